"""How `megarl drain` asks a run to end after its step: files in the run's folder, which another machine may share.

| file | who makes it | meaning |
|---|---|---|
| `.alive` | the run | it lives, and on which machine; it is touched every ten seconds |
| `.drain` | the command | the run is to end after its step |
| `.drain-seen` | the run, which renames `.drain` | it will |
| `.drain-OUTCOME` | the run at its end, which renames `.drain-seen` | it has ended, and how |

To rename a file takes no room on a full disk. A run begins by removing what is left of one that was killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from megarl.disk import begin, has_ended, is_locked

LOCK = ".lock"  # of the process that writes to the folder
_ALIVE = ".alive"
_REQUEST = ".drain"
_SEEN = ".drain-seen"
_OUTCOME = ".drain-"
_SAVED = "saved-"
FINISHED = "finished"  # all steps were done
FAILED = "failed"
UNSAVED = "unsaved"  # the disk did not take the checkpoint, and the run goes on
NOTHING = "nothing"  # ended before the first step
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOOK_S = 0.5
_TOUCH_S = 10.0
_SILENT_S = 120.0  # network file systems show a change to other machines within a minute
_END_S = 1.0


def saved(step: int) -> str:
    """The outcome of a run that has ended after a step, with its checkpoint."""
    return f"{_SAVED}{step:06d}"


def saved_step(outcome: str) -> int | None:
    """The opposite; None for another outcome."""
    if outcome.startswith(_SAVED):
        return int(outcome.removeprefix(_SAVED))
    return None


class DrainRequests:
    """The run's side: a thread answers a request at once, while the run is busy with its step.

    The run makes it when it has the folder's lock, and closes it last. No method raises an error of the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wanted = Event()
        self._closing = Event()
        with suppress(OSError):
            _remove_requests(folder)
            _write_sign(folder)
        self._thread = Thread(target=self._answer, name="drain requests", daemon=True)
        self._thread.start()

    @property
    def is_wanted(self) -> bool:
        """Whether the run is to end after its step."""
        return self._wanted.is_set()

    def decline(self) -> None:
        """Answer that the run goes on, because it could not be resumed."""
        self._wanted.clear()
        has_ended(begin(lambda: self._conclude(UNSAVED)), _END_S)

    def close(self, outcome: str) -> None:
        """Answer a request with the run's end, and take the sign of life away."""
        self._closing.set()
        self._thread.join(_END_S)

        def end() -> None:
            self._conclude(outcome)
            (self._folder / _ALIVE).unlink(missing_ok=True)

        has_ended(begin(end), _END_S)

    def _answer(self) -> None:
        touched_at = time.monotonic()
        while not self._closing.wait(_LOOK_S):
            with suppress(OSError):
                (self._folder / _REQUEST).rename(self._folder / _SEEN)
                self._wanted.set()
            if time.monotonic() - touched_at >= _TOUCH_S:
                touched_at = time.monotonic()
                with suppress(OSError):
                    os.utime(self._folder / _ALIVE)

    def _conclude(self, outcome: str) -> None:
        for name in (_REQUEST, _SEEN):
            with suppress(OSError):
                (self._folder / name).rename(self._folder / f"{_OUTCOME}{outcome}")


@dataclass
class RunInFolder:
    """The command's side: a run that lives, as far as its folder tells. host: the name of its machine."""

    folder: Path
    host: str
    _is_here: bool  # on this machine, whose locks are known exactly
    _touched: float
    _changed_at: float

    @classmethod
    def find(cls, folder: Path) -> RunInFolder | None:
        """None where there is no sign of a run, or the run has died on this machine."""
        try:
            file = folder / _ALIVE
            sign = json.loads(file.read_text(encoding="utf-8"))
            host = str(sign["host"])
            is_here = bool(_boot()) and sign["boot"] == _boot()
            run = cls(folder, host, is_here, file.stat().st_mtime, time.monotonic())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if run.has_died() else run

    def ask(self) -> None:
        """Ask it to end after its step. Raises OSError."""
        _remove_outcomes(self.folder)
        if not self.has_seen():
            (self.folder / _REQUEST).touch()

    def has_seen(self) -> bool:
        """Whether it has answered that it will."""
        return (self.folder / _SEEN).exists()

    def is_asked(self) -> bool:
        """Whether the request is neither answered in the end nor removed by another run that began meanwhile."""
        is_left = any((self.folder / name).exists() for name in (_REQUEST, _SEEN))
        return is_left and (self.folder / _ALIVE).exists()

    def has_died(self) -> bool:
        """Whether it has shown no sign of life for too long; of a run on this machine, whether its lock is free."""
        if self._is_here:
            return not is_locked(self.folder / LOCK)
        with suppress(OSError):
            touched = (self.folder / _ALIVE).stat().st_mtime
            if touched != self._touched:
                self._touched = touched
                self._changed_at = time.monotonic()
        return time.monotonic() - self._changed_at > _SILENT_S

    def take_outcome(self) -> str | None:
        """How it has answered the request in the end, once; None as long as it has not."""
        for file in self.folder.glob(f"{_OUTCOME}*"):
            if file.name != _SEEN:
                file.unlink(missing_ok=True)
                return file.name.removeprefix(_OUTCOME)
        return None

    def withdraw(self) -> None:
        """Remove the request."""
        _remove_requests(self.folder)


def _boot() -> str:
    """A text that differs between machines, and between two starts of one; "" where the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _write_sign(folder: Path) -> None:
    sign = {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid()}
    partial = folder / f"{_ALIVE}.partial"
    partial.write_text(json.dumps(sign), encoding="utf-8")
    partial.replace(folder / _ALIVE)


def _remove_requests(folder: Path) -> None:
    for name in (_REQUEST, _SEEN):
        (folder / name).unlink(missing_ok=True)
    _remove_outcomes(folder)


def _remove_outcomes(folder: Path) -> None:
    for file in folder.glob(f"{_OUTCOME}*"):
        if file.name != _SEEN:
            file.unlink(missing_ok=True)
