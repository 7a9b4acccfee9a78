"""Turns values, errors and untrusted text into text that is safe to print: hidden characters are escaped.

Model outputs, data, chat templates, exceptions and file names may hold escape sequences, which a terminal executes,
and characters that reorder or hide the text around them (Unicode Technical Report 36). Everything that megarl
prints passes through `printable` or `show`, and every line of `samples.jsonl` through `json_line`.
`short` and `describe_error` also limit the length.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import IO, Any

Say = Callable[[str], None]  # prints a line
_KEPT = "\n\t"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # Unicode's general categories
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e]")
_LONGEST_ERROR = 300


def is_hidden(character: str) -> bool:
    """Whether a character is a control or format character, half a surrogate pair, unassigned, or a line break."""
    return unicodedata.category(character) in _HIDDEN


def printable(text: object, kept: str = _KEPT) -> str:
    """The text with hidden characters escaped as in a Python string literal; those in `kept` stay as they are."""
    return _BEYOND_ASCII.sub(lambda match: _escaped(match[0], kept), str(text))


def one_line(text: object) -> str:
    """`printable` with line breaks and tabs escaped too."""
    return printable(text, kept="")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its type where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class OutputFailed(OSError):
    """A stream cannot be written: its reader has gone, or its disk is full."""


def show(text: object, file: IO[str] | None = None) -> None:
    """Print an escaped text to a stream, by default standard output. Raises OutputFailed."""
    try:
        print(printable(text), file=file or sys.stdout, flush=True)
    except OSError as error:
        raise OutputFailed(error.errno, error.strerror) from error


def json_line(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """A value as one line of JSON, with hidden characters escaped; parsing the line gives the value again.

    default: converts a value that JSON has no type for.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _BEYOND_ASCII.sub(_escaped_for_json, text)


def short(value: object, longest: int = 80) -> str:
    """A value as Python writes it, cut to `longest` characters."""
    if isinstance(value, str):
        value = value[: 2 * longest]
    return _cut(repr(value), longest)


def describe_error(error: BaseException) -> str:
    """An exception as one line."""
    try:
        words = " ".join(f"{type(error).__name__}: {error}".split())
    except BaseException:
        # Its __str__ raises, perhaps KeyboardInterrupt, which would end a worker process.
        words = type(error).__name__
    return _cut(words, _LONGEST_ERROR)


def plain_value(value: Any) -> Any:
    """A value that JSON has no type for: arrays become lists; bytes, dates and all others become text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)


def _escaped(character: str, kept: str) -> str:
    if character in kept or not is_hidden(character):
        return character
    return character.encode("unicode_escape").decode("ascii")


def _escaped_for_json(match: re.Match[str]) -> str:
    character = match[0]
    return json.dumps(character)[1:-1] if is_hidden(character) else character


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
