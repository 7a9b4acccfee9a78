"""Values, errors and untrusted text for a terminal or a log: short, and control and invisible characters escaped.

Model outputs, data, chat templates, exceptions and file names may hold escape sequences, which a terminal carries out,
and characters that reorder or hide the text around them (Unicode Technical Report 36). Everything that megarl
prints passes through `printable` or `show`, and every line of `samples.jsonl` through `json_line`.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import IO, Any

_KEPT = "\n\t"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # Unicode's general categories
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e]")
_LONGEST_WORDS = 300


def is_hidden(character: str) -> bool:
    """Whether a character is a control or format character, half a surrogate pair, unassigned, or a line break."""
    return unicodedata.category(character) in _HIDDEN


def printable(text: object, kept: str = _KEPT) -> str:
    """The text with hidden characters escaped as in a Python string literal; those in `kept` stay as they are."""
    return _BEYOND_ASCII.sub(lambda found: _escaped(found[0], kept), str(text))


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
    return _BEYOND_ASCII.sub(
        lambda found: json.dumps(found[0])[1:-1] if is_hidden(found[0]) else found[0], text
    )


def _escaped(character: str, kept: str) -> str:
    if character in kept or not is_hidden(character):
        return character
    return character.encode("unicode_escape").decode("ascii")


def short(value: object, longest: int = 80) -> str:
    """A value as Python writes it, cut to `longest` characters."""
    text = repr(value[: 2 * longest] if isinstance(value, str) else value)
    if len(text) <= longest:
        return text
    return f"{text[: longest - 3]}..."


def describe_error(error: BaseException) -> str:
    """An exception as one line."""
    try:
        words = " ".join(f"{type(error).__name__}: {error}".split())
    except (
        BaseException
    ):  # its __str__ raises, perhaps KeyboardInterrupt, which would end a worker process
        words = type(error).__name__
    if len(words) <= _LONGEST_WORDS:
        return words
    return f"{words[: _LONGEST_WORDS - 3]}..."


def plain_value(value: Any) -> Any:
    """A value that JSON has no type for: arrays become lists; bytes, dates and all others become text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)
