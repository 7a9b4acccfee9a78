"""How many engines `megarl engines` asks a run for: a file in the run's folder, which another machine may share.

A request replaces the one before it, and stays, so that a run that resumes has it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from megarl.disk import begin, has_ended

_REQUEST = ".engines"
_ANSWER_S = 1.0  # of the disk, which the run does not wait for


def request_engines(folder: Path, count: int) -> None:
    """Ask the run that writes to the folder for so many engines. Raises OSError."""
    partial = folder / f"{_REQUEST}.{os.getpid()}"
    partial.write_text(f"{count}\n", encoding="utf-8")
    partial.replace(folder / _REQUEST)


def requested_engines(folder: Path) -> int | None:
    """What was asked for last; None where nothing was, or the disk does not say."""
    reading = begin(lambda: int((folder / _REQUEST).read_text(encoding="utf-8")))
    if not has_ended(reading, _ANSWER_S):
        return None
    try:
        return reading.result()
    except (OSError, ValueError):
        return None
