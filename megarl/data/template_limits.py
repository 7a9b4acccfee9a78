"""A check of the chat template, a program that comes with a checkpoint: a child process runs it within bounds.

Of a large file some rows are rendered: the longest, the first of each kind of chat, and others at even distances.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.isolation.inside_launcher import limit
from megarl.model.tokenizer import chat_messages
from megarl.types import UserError

_MOST_ROWS = 512
_MOST_CHARACTERS = 1_000_000  # of a rendered text, plus 100 for each character of its messages
_MORE_BYTES = 1024**3  # that rendering may allocate
_HINT = "correct the checkpoint's chat template (chat_template.jinja, or in tokenizer_config.json)"

Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Bounds:
    """row_s: the limit of one row; total_s: after this time no further row is rendered."""

    row_s: float = 10.0
    total_s: float = 30.0


def template_error(
    tokenizer: Any,
    prompts: Iterable[tuple[str, Any]],
    response: str | None = None,
    bounds: Bounds | None = None,
) -> UserError | None:
    """The fault of a template that does not end, or whose text is not bounded; rows that it refuses are no fault here.

    prompts: (place, a text or chat messages). response: the assistant's, where whole chats are rendered.
    """
    if not tokenizer.chat_template:
        return None
    if response is None:
        end = []
    else:
        end = [{"role": "assistant", "content": response}]
    chats = [
        (place, [*chat_messages(prompt), *end])
        for place, prompt in prompts
        if isinstance(prompt, str | list)
    ]
    chosen = _chosen([chat for _, chat in chats])
    number, problem = _try(
        [chats[index][1] for index in chosen], tokenizer, response is None, bounds or Bounds()
    )
    if not problem:
        return None
    return UserError(
        "model.path", f"the chat template {problem} for {chats[chosen[number]][0]}", _HINT
    )


def _size(chat: Chat) -> int:
    return sum(
        len(value) for message in chat for value in message.values() if isinstance(value, str)
    )


def _chosen(chats: Sequence[Chat]) -> list[int]:
    """The numbers of at most _MOST_ROWS chats."""
    if len(chats) <= _MOST_ROWS:
        return list(range(len(chats)))
    longest = sorted(range(len(chats)), key=lambda index: -_size(chats[index]))[: _MOST_ROWS // 2]
    kinds: dict[object, int] = {}
    for index, chat in enumerate(chats):
        kinds.setdefault(
            tuple((str(message.get("role")), *map(str, message)) for message in chat), index
        )
    first = list(kinds.values())[: _MOST_ROWS // 4]
    between = range(0, len(chats), -(-len(chats) // (_MOST_ROWS // 4)))
    return list(dict.fromkeys([*longest, *first, *between]))


def _try(chats: Sequence[Chat], tokenizer: Any, asks: bool, bounds: Bounds) -> tuple[int, str]:
    """(number of the first chat with a problem, the problem); "" where there is none."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # about a fork with threads, whose locks the child ignores
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _render_all(chats, tokenizer, asks, writing, bounds)
    os.close(writing)
    try:
        return _watch(reading, len(chats), bounds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _watch(reading: int, count: int, bounds: Bounds) -> tuple[int, str]:
    """Read the child's pipe: a dot for each good chat, then the problem of the first bad one."""
    end = time.monotonic() + bounds.total_s
    done = 0
    while done < count and time.monotonic() < end:
        if not select.select([reading], [], [], bounds.row_s)[0]:
            return done, f"does not end within {bounds.row_s:g} s"
        received = os.read(reading, 4096)
        good = len(received) - len(received.lstrip(b"."))
        done += good
        if received[good:]:
            return done, received[good:].decode()
        if not received:
            return done, "ends the process that renders it"
    return done, ""


def _render_all(
    chats: Sequence[Chat], tokenizer: Any, asks: bool, writing: int, bounds: Bounds
) -> None:
    """Run in the child, which ends here."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        limit(resource.RLIMIT_AS, _used_bytes() + _MORE_BYTES)
        # should the parent be gone
        limit(resource.RLIMIT_CPU, int(bounds.total_s + bounds.row_s) + 1)
        limit(resource.RLIMIT_CORE, 0)
        for chat in chats:
            problem = _problem(chat, tokenizer, asks)
            os.write(writing, problem.encode() or b".")
            if problem:
                break
    finally:
        os._exit(0)


def _problem(chat: Chat, tokenizer: Any, asks: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
    except MemoryError:
        return f"takes more than {_MORE_BYTES // 1024**2} MB"
    except Exception:
        return ""  # a template that refuses a row is reported when the row is rendered for use
    most = _MOST_CHARACTERS + 100 * _size(chat)
    if len(text) > most:
        return f"writes {len(text)} characters"
    return ""


def _used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
