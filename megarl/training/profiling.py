"""torch's profiler in a training rank: records the next call of `train`, and writes it as a Chrome trace.

All functions run in the thread of the rank's calls, whose operations the profiler records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megarl.device import DEVICE

# of this process: where the next profile goes, and the profile
_file: Path | None = None
_profile: Any = None


def begin(file: str) -> None:
    """Profile the next block of `profiled`, for this file."""
    global _file, _profile
    _file = Path(file)
    _profile = None


@contextmanager
def profiled() -> Iterator[None]:
    """Profile the block if that was asked for."""
    global _profile
    if _file is None or _profile is not None:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as _profile:
        yield


def forget() -> None:
    """Drop the profile that was asked for, as that of a step that has failed."""
    global _file, _profile
    _file = None
    _profile = None


def end() -> str | None:
    """Write the profile that was asked for; its file, or None where no block was profiled."""
    global _file, _profile
    file = _file
    done = _profile
    _file = None
    _profile = None
    if file is None or done is None:
        return None
    file.parent.mkdir(exist_ok=True)
    done.export_chrome_trace(str(file))
    return str(file)
