"""Where a command's result goes: standard output, whose reader may have gone or whose disk is full, and files."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megarl.disk import output_error
from megarl.printable import OutputFailed, show
from megarl.types import UserError


def say_all(text: str) -> None:
    """Print a text as it is; the command goes on where the reader has closed the pipe, as `head` does.

    Raises OutputFailed where it cannot be written.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:
        raise OutputFailed(error.errno, error.strerror) from error


def tell_output_failed(error: OutputFailed) -> None:
    """Say on standard error why the command ends."""
    _drop(sys.stdout)
    last_word(f"megarl: the output cannot be written ({error.strerror})")


def last_word(text: object) -> None:
    """Say on standard error how the command ends; where that cannot be written either, the exit code says it alone."""
    try:
        show(text, sys.stderr)
    except OutputFailed:
        _drop(sys.stderr)


def leave_at_once(raised: BaseException | None) -> None:
    """Exit without waiting for threads that a disk without an answer may hold for ever. raised: what ends Python."""
    code = raised.code if isinstance(raised, SystemExit) else 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)


def _drop(stream: TextIO) -> None:
    """Let nothing more be written to a stream, which would fail once more as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_picture(path: Path, *, is_search: bool) -> None:
    """Raises UserError, before anything is planned, where the plan's picture could not be written to `path`."""
    if is_search:
        raise UserError("--picture", "a search has no picture", "leave one of them out")
    if error := output_error(path, "--picture", replaces=True):
        raise error
