"""Signals that end a run, and the processes that it must not leave behind. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 5.0


_terminated = threading.Event()
_end_wanted = threading.Event()


def raise_on_sigterm() -> None:
    """Turn SIGTERM (Slurm, `kill`) into KeyboardInterrupt, so that a run ends through its `with` blocks.

    Ray's waits let no other exception through.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        _terminated.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def was_terminated() -> bool:
    """Whether the KeyboardInterrupt was a SIGTERM."""
    return _terminated.is_set()


def note_sigusr1() -> None:
    """Take SIGUSR1 (Slurm, some minutes before the time limit) as a request to end soon; a second one is a SIGTERM.

    The handler only sets a flag, so that the run, with its calls to Ray, continues to a point where it can end.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        if _end_wanted.is_set():
            signal.raise_signal(signal.SIGTERM)
        _end_wanted.set()

    signal.signal(signal.SIGUSR1, handler)


def is_end_wanted() -> bool:
    """Whether SIGUSR1 has come."""
    return _end_wanted.is_set()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that kill_descendants finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(spare: Collection[int] = ()) -> list[psutil.Process]:
    """Every descendant of this process, except the process ids in `spare` and their descendants."""
    found: list[psutil.Process] = []
    waiting = psutil.Process(os.getpid()).children()
    while waiting:
        process = waiting.pop()
        if process.pid in spare:
            continue
        found.append(process)
        with suppress(psutil.NoSuchProcess):
            waiting += process.children()
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP, Ctrl-Z): it exists and does nothing."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def kill_descendants(spare: Collection[int]) -> None:
    """SIGKILL and reap every descendant of this process, except those in `spare` and their descendants."""
    left = descendants(spare)
    while left:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_REAP_S)
        alive = descendants(spare)
        if {process.pid for process in alive} == {process.pid for process in left}:
            return  # unkillable (kernel wait): nothing more can be done from here
        left = alive


def remove_counters(pids: Collection[int], folder: Path = SHARED_MEMORY) -> None:
    """Remove torch's reference counters of CUDA IPC memory, `torch_<pid>_*`, of processes that have ended.

    Torch removes them when a process exits, but the processes of a run are killed. A file that is older than this
    command, or another user's, belongs to a process of another container with the same id.
    """
    ending: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            ending.append(psutil.Process(pid))
    alive = {process.pid for process in psutil.wait_procs(ending, timeout=_REAP_S)[1]}
    began = psutil.Process().create_time()
    for file in (file for pid in {*pids} - alive for file in folder.glob(f"torch_{pid}_*")):
        with suppress(OSError):
            status = file.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime >= began:
                file.unlink()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore the signals that end a run: a second signal must not interrupt the cleanup after the first."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
