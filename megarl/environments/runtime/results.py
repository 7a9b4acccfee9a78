"""What tools and environments return, as the model and the caller get it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from megarl.environments.runtime.environment import Observation
from megarl.printable import short
from megarl.types.reward_result import LARGEST_REWARD

CallError = Literal["unknown", "arguments", "raised", "result", "timeout", "memory", "ended"]
# errors to be mended in the tool
TOOL_ERRORS: frozenset[str] = frozenset({"result", "timeout", "memory", "ended"})


class BadResult(Exception):
    """A function has returned what is no result of it; the text says what, after the function's name."""

    kind = "result"


@dataclass(frozen=True)
class CallResult:
    """The answer to a call, or to a response.

    text: for the model, also where the call failed. error: None, or why there is no result of the tool: `unknown` (no
    tool has the name), `arguments` (they do not fit), `raised` (an exception), `result` (it returned what is no text),
    `timeout`, `memory` (a limit was exceeded), `ended` (the tool ended its process). seconds: from the time that a
    process began with it.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    error: CallError | None = None
    seconds: float = 0.0


def observation_of(result: Any, most_bytes: int) -> Observation:
    """A tool's return value, its text cut to `most_bytes`. Raises BadResult."""
    if not isinstance(result, Observation):
        return Observation(cut(_text_of(result), most_bytes))
    if not isinstance(result.text, str):
        raise BadResult(f"returned an observation whose text is {short(result.text)}")
    if not (isinstance(result.reward, Real) and abs(float(result.reward)) <= LARGEST_REWARD):
        raise BadResult(f"returned an observation whose reward is {short(result.reward)}")
    return Observation(cut(result.text, most_bytes), float(result.reward), bool(result.done))


def _text_of(result: Any) -> str:
    if result is None or isinstance(result, str):
        return result or ""
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadResult(
            f"returned a value of type {type(result).__name__}, which is neither text nor JSON"
        ) from None


def cut(text: str, most_bytes: int) -> str:
    """The text as UTF-8 can hold it; beginning and end, and what is missing between, where it has too many bytes."""
    if len(text) <= 2 * most_bytes:
        edge = text
    else:
        edge = f"{text[:most_bytes]}{text[-most_bytes:]}"
    raw = edge.encode("utf-8", "replace")
    if edge is text and len(raw) <= most_bytes:
        return raw.decode()
    half = most_bytes // 2
    head = raw[:half].decode(errors="ignore")
    tail = raw[-half:].decode(errors="ignore")
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"
