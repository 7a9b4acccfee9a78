"""Files that a run appends to. What the disk does not take waits in memory, up to a bound, and is written later."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from megarl.disk import begin, folder_gone, has_ended, writing
from megarl.printable import Say
from megarl.types import DiskFault, Silence

MOST_BYTES = 2**26  # of a file's pieces that wait
_PATIENCE_S = 10.0  # how long a step waits for the disk, the first time that it does not answer
_LAST_S = 30.0  # the same at the end of a run
_EARLY_LAST_S = 5.0  # and of one that is stopped or fails
_LOSSES_S = 1.0  # the same where a process is lost, and the run has to go on


class _Piece(NamedTuple):
    """What one step adds to a file."""

    number: int
    step: int
    data: bytes


class AppendedFile:
    """A file that grows by pieces, each of which is in it whole or waits for the next attempt with those after it.

    It is opened for each attempt, so that its disk may be mounted anew between two of them. Where more than
    `most_bytes` wait, the oldest pieces are lost. `put` and the properties may be used while another thread writes.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """path: a file that may exist already."""
        self.path = path
        self._size = path.stat().st_size if path.exists() else 0  # of its whole pieces
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._num_pieces = 0
        self._lost: list[int] = []

    def put(self, step: int, data: bytes) -> None:
        """Add a piece, for `write` to write."""
        if not data:
            return
        with self._lock:
            self._num_pieces += 1
            self._waiting.append(_Piece(self._num_pieces, step, data))
            self._waiting_bytes += len(data)
            while self._waiting_bytes > self._most_bytes and len(self._waiting) > 1:
                self._lost.append(self._taken().step)

    def write(self) -> None:
        """Write what waits. Raises OSError: then all of it still waits, and the file has no half of it where it can be
        cut."""
        with self._lock:
            pieces = tuple(self._waiting)
        if not pieces:
            return
        self._append(b"".join(piece.data for piece in pieces))
        with self._lock:
            while self._waiting and self._waiting[0].number <= pieces[-1].number:
                self._taken()

    @property
    def waiting(self) -> list[int]:
        """The steps whose pieces wait."""
        with self._lock:
            return [piece.step for piece in self._waiting]

    def take_lost(self) -> list[int]:
        """The steps whose pieces were dropped, since the last time."""
        with self._lock:
            lost = self._lost
            self._lost = []
            return lost

    def _taken(self) -> _Piece:
        piece = self._waiting.popleft()
        self._waiting_bytes -= len(piece.data)
        return piece

    def _append(self, data: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            file_size = os.fstat(file).st_size
            size = min(self._size, file_size)  # somebody may have emptied it to make room
            if file_size > size:
                os.ftruncate(file, size)  # half a piece, of an earlier attempt
            try:
                _write_all(file, data, size)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)  # network file systems tell here that there was no room
        self._size = size + len(data)


def _write_all(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest = rest[written:]
        offset += written


class RunFiles:
    """metrics.jsonl, samples.jsonl and losses.jsonl: a step goes on where the disk does not take its lines.

    That is said when it begins, with how much may wait, and when it is over. `close` says what is lost.
    """

    def __init__(
        self, records: Path, samples: Path, losses: Path, say: Say, timeout_s: float
    ) -> None:
        """records, samples: existing files of one folder; losses: made with its first line. say: prints a line.

        timeout_s: run.timeout_s.
        """
        self._folder = records.parent
        self._names = f"{records.name} and {samples.name}"
        self._of_steps = (AppendedFile(records), AppendedFile(samples))
        self._losses = AppendedFile(losses)
        self._files = (*self._of_steps, self._losses)
        self._own = records.stat()
        self._say = say
        self._patience_s = min(_PATIENCE_S, timeout_s / 5)
        self._last_s = min(_LAST_S, timeout_s)
        # an attempt that the disk has not answered
        self._open_attempt: Future[None] | None = None
        # why nothing is written, as it was said; and the steps since
        self._trouble: Exception | None = None
        self._late: set[int] = set()

    def put_losses(self, step: int, losses: str) -> None:
        """Add lines, which are written with the next ones of a step, or at the end."""
        self._losses.put(step, losses.encode("utf-8"))

    def write_losses(self) -> None:
        """Write them before that, where the disk takes them. Raises FolderGone."""
        self._attempt(_LOSSES_S, 0.0)

    def write(self, step: int, records: str, samples: str) -> None:
        """Write a step's lines after those that wait. Raises FolderGone where the folder was removed or replaced."""
        texts = (records.encode("utf-8"), samples.encode("utf-8"))
        for file, text in zip(self._of_steps, texts, strict=True):
            file.put(step, text)
        self._late.add(step)
        trouble = self._attempt(self._patience_s, 0.0 if self.is_silent else self._patience_s)
        if trouble is None:
            self._tell_over()
            self._late.clear()
        elif self._trouble is None:
            most_steps = max(1, MOST_BYTES // max(map(len, texts)))
            self._say(
                f"{_problem(trouble)}: the run goes on, and the lines of the last {most_steps} steps at most "
                "wait in memory"
            )
        self._trouble = trouble

    def close(self, *, is_early: bool) -> None:
        """Write what waits. Raises FolderGone, or DiskFault or Silence with the steps whose lines are lost.

        is_early: the run is stopped or has failed, so that the disk gets less time.
        """
        patience_s = min(_EARLY_LAST_S, self._patience_s) if is_early else self._last_s
        trouble = self._attempt(patience_s, patience_s)
        if trouble is None:
            self._tell_over()
            return
        self._trouble = trouble
        waiting = {step for file in self._files for step in file.waiting}
        lost = waiting | self._take_lost()
        if not lost:
            return
        problem = f"{_problem(trouble)}, so that the lines of {_steps(lost)} are lost"
        if isinstance(trouble, Silence):
            raise Silence(problem)
        raise DiskFault("run.dir", problem, "make room there, or name a folder on another disk")

    @property
    def is_silent(self) -> bool:
        """Whether the disk did not answer when it was written last."""
        return isinstance(self._trouble, Silence)

    def is_gone(self) -> bool:
        """Whether the folder was removed or replaced, so that what is written is lost."""
        path = self._files[0].path
        return not (path.exists() and os.path.samestat(path.stat(), self._own))

    def _attempt(self, patience_s: float, patience_with_earlier_s: float) -> Exception | None:
        """Write what waits; the error of the disk, if it has one. Raises FolderGone.

        patience_with_earlier_s: with an attempt that the disk has not answered.
        """
        if earlier := self._open_attempt:
            if not has_ended(earlier, patience_with_earlier_s):
                return self._trouble
            self._open_attempt = None
        attempt = begin(self._write_all)
        if not has_ended(attempt, patience_s):
            self._open_attempt = attempt
            return Silence(
                f"the disk of {self._folder} has not answered for {patience_s:.0f} s while {self._names} were written"
            )
        error = attempt.exception()
        if error is None or isinstance(error, DiskFault | OSError):
            return error
        raise error

    def _write_all(self) -> None:
        with writing(self._folder, self._names):
            if self.is_gone():
                raise folder_gone(self._folder, self._files[0].path.name)
            for file in self._files:
                file.write()

    def _tell_over(self) -> None:
        """After the attempt that wrote everything."""
        if self._trouble is None:
            return
        lost = self._take_lost()
        text = f"{self._names} are written again, with the lines of {_steps(self._late - lost)} that waited"
        if lost:
            text += f"; those of {_steps(lost)} are lost"
        self._say(text)

    def _take_lost(self) -> set[int]:
        return {step for file in self._files for step in file.take_lost()}


def _problem(trouble: Exception) -> str:
    return trouble.problem if isinstance(trouble, DiskFault) else str(trouble)


def _steps(steps: Collection[int]) -> str:
    first = min(steps)
    last = max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"
