"""What a test's processes leave: files in the machine's shared places, where others come and go, and processes."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable

import psutil

_OURS = ("megarl-", "sglang")
# until files of a test in another process are gone again, those of a killed run when the next one has started
_PATIENCE_S = 60.0


def shared_files() -> set[str]:
    """What a run could forget: in shared memory, and in the folders of temporary files."""
    folders = {"/tmp", tempfile.gettempdir()}
    temporary = {
        f"{folder}/{name}"
        for folder in folders
        for name in os.listdir(folder)
        if name.startswith(_OURS)
    }
    return temporary | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def left_since(before: set[str]) -> list[str]:
    """The files that are there now and stay, were not `before`, and are no live session's."""
    deadline = time.monotonic() + _PATIENCE_S
    left = shared_files() - before
    while left := {path for path in left & shared_files() if not _is_in_use(path)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return sorted(left)


def _is_in_use(path: str) -> bool:
    """Whether it is the folder of a live session, which holds the lock in it, of another test process.

    That one has temporary files of its own: what lies among ours was made here.
    """
    if os.path.dirname(path) == tempfile.gettempdir():
        return False
    try:
        with open(f"{path}/megarl.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_alive(pid: int) -> bool:
    """A zombie is dead: in a container nobody may be there to reap an orphan."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int], within_s: float = 20.0) -> bool:
    """Whether all of these processes end in time."""
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
