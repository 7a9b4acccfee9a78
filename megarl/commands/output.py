"""Where a command's result goes: standard output, whose reader may have gone or whose disk is full, and files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megarl.disk import output_fault
from megarl.types import UserFault


def say_all(text: str) -> None:
    """Print; the reader may have closed the pipe, as `head` does. Raises UserFault where it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more as it ends
        if not isinstance(error, BrokenPipeError):
            raise UserFault("stdout", f"cannot be written ({error.strerror})", "send it elsewhere") from None


def check_picture(path: Path, *, is_search: bool) -> None:
    """Raises UserFault, before anything is planned, where the plan's picture could not be written to `path`."""
    if is_search:
        raise UserFault("--picture", "a search has no picture", "leave one of them out")
    if fault := output_fault(path, "--picture", replaces=True):
        raise fault
