"""What was said in an episode, for its reader and for reward functions: JSON of a bounded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any, Literal

from megarl.environments.runtime.results import TOOL_ERRORS, CallResult, cut
from megarl.episodes.tool_calls import BadCall, ToolCall
from megarl.printable import json_line
from megarl.types import Sample, Transcript, TranscriptCall, TranscriptEntry
from megarl.types.json_objects import CallArguments, depth

MOST_BYTES = 2**16  # of a transcript as JSON
# bytes of each text: the first limit with which all entries fit
LONGEST_TEXTS = 4000, 1000, 250, 50
_LONGEST_NAME = 100
_DEEPEST = 16  # levels of arguments that are kept as values


class TranscriptWriter:
    """Takes down an episode as it happens. begun: the entries of the phases before."""

    def __init__(self, begun: Sequence[TranscriptEntry] = ()) -> None:
        self._entries = deepcopy(list(begun))

    def add_message(self, text: str) -> None:
        """The environment's text, which the model reads as the user's."""
        self._entries.append(_entry("user", text))

    def add_turn(self, text: str) -> None:
        """All that the model wrote in a turn."""
        self._entries.append(_entry("assistant", text))

    def add_calls(
        self,
        calls: Sequence[ToolCall | BadCall],
        results: Sequence[CallResult],
        texts: Sequence[str],
    ) -> None:
        """The last turn's calls. results: of all of them; texts: what the model reads of each."""
        entries = self._entries[-1]["calls"]
        for call, result, text in zip(calls, results, texts, strict=True):
            entry: TranscriptCall = {
                "name": call.name,
                "arguments": None,
                "result": text,
                "error": "bad_call",
            }
            if isinstance(call, ToolCall):
                entry["arguments"] = _json_value(call.arguments)
                entry["error"] = result.error
            entries.append(entry)

    def add_reward(self, reward: float) -> None:
        """The reward of the last turn."""
        self._entries[-1]["reward"] += reward

    @property
    def entries(self) -> Transcript:
        """All of it as JSON, nothing shortened: what a further phase goes on with."""
        return tuple(self._entries)

    def transcript(self) -> Transcript:
        """All entries with their long texts shortened; entries of the middle are left out where that is not enough."""
        kept: list[TranscriptEntry] = []
        sizes: list[int] = []
        for longest in LONGEST_TEXTS:
            kept = [_shortened(entry, longest) for entry in self._entries]
            sizes = [len(json.dumps(entry)) for entry in kept]
            if sum(sizes) <= MOST_BYTES:
                return tuple(kept)
        first, last = (
            sum(total <= MOST_BYTES // 2 for total in accumulate(way))
            for way in (sizes, sizes[::-1])
        )
        diff = _entry("left_out", f"[... {len(kept) - first - last} entries left out ...]")
        return (*kept[:first], diff, *kept[len(kept) - last :])


def _entry(role: Literal["assistant", "user", "left_out"], text: str) -> TranscriptEntry:
    return {"role": role, "text": text, "calls": [], "reward": 0.0}


def _shortened(entry: TranscriptEntry, longest: int) -> TranscriptEntry:
    calls: list[TranscriptCall] = [
        {
            **call,
            "name": call["name"] and cut(call["name"], _LONGEST_NAME),
            "arguments": _short_arguments(call["arguments"], longest),
            "result": cut(call["result"], longest),
        }
        for call in entry["calls"]
    ]
    return {**entry, "text": cut(entry["text"], longest), "calls": calls}


def _json_value(arguments: CallArguments) -> Any:
    """The arguments of a call; a text where they are deeply nested, or have numbers that JSON has not."""
    # whoever writes it again may have less room on the stack
    if (levels := depth(dict(arguments))) > _DEEPEST:
        return f"[arguments nested in {levels} levels]"
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:  # NaN or an infinity
        return json_line(arguments)
    return dict(arguments)


def _short_arguments(arguments: Any, longest: int) -> Any:
    """The value; its text, shortened, where it is long."""
    if isinstance(arguments, str):
        return cut(arguments, longest)
    if len(json.dumps(arguments)) <= longest:
        return arguments
    return cut(json_line(arguments), longest)


def failed_calls(samples: Sequence[Sample]) -> tuple[str, ...]:
    """What is said of each call, in the transcripts of the samples, whose error is to be mended in its tool."""
    entries = (entry for sample in samples for entry in sample.transcript)
    calls = (call for entry in entries for call in entry["calls"])
    return tuple(call["result"] for call in calls if call["error"] in TOOL_ERRORS)
