"""Where a command's result goes: standard output, whose reader may have gone or whose disk is full, and files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
        _drop_output()
    except OSError as error:
        raise OutputFailed(error.errno, error.strerror) from error


def tell_output_failed(error: OutputFailed) -> None:
    """Say on standard error why the command ends."""
    _drop_output()
    show(f"megarl: the output cannot be written ({error.strerror})", sys.stderr)


def _drop_output() -> None:
    """Let nothing more be written to standard output, which would fail once more as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_picture(path: Path, *, is_search: bool) -> None:
    """Raises UserError, before anything is planned, where the plan's picture could not be written to `path`."""
    if is_search:
        raise UserError("--picture", "a search has no picture", "leave one of them out")
    if error := output_error(path, "--picture", replaces=True):
        raise error
