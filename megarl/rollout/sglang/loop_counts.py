"""Detecting schedulers that hang: each counts the rounds of its event loop in a shared file that the host reads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from megarl.cluster import processes
from megarl.cluster.deadline import Deadline
from megarl.cluster.stillness import GroupStillness, Stillness, work_of

_EXEMPT = -1  # the current operation has a timeout of its own
# a process that waits for a hanging one is reported this much later than the hanging one
PEERS_S = 5.0
_LEAST_ROUND_S = 60.0


class LoopCounter:
    """The counter of one scheduler, 0 before its loop begins; a round is a forward pass, or a check for requests."""

    def __init__(self, file: Path, index: int) -> None:
        self._counts = np.memmap(file, np.int64)
        self._index = index
        self._count = 0

    def count(self) -> None:
        self._count += 1
        self._counts[self._index] = self._count

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Judge the block by its work alone: its content has a timeout of its own, unless it is stuck before it."""
        self._counts[self._index] = _EXEMPT
        try:
            yield
        finally:
            self.count()


def make_counter_file(file: Path, count: int) -> None:
    """Create the file of the counters of `count` schedulers."""
    np.zeros(count, np.int64).tofile(file)


@dataclass
class _Progress:
    """A scheduler's last count, and for how long it has been stopped by a signal or in the same round.

    stillness: in the same round, or in an operation that has a timeout of its own.
    """

    count: int = 0
    stopped_s: float = 0.0
    same_s: float = 0.0
    stillness: Stillness = field(default_factory=Stillness)

    def still_s(self, now_s: float, pid: int, *, is_judged: bool) -> float:
        """For how long the process has done no work in its round or exchange; 0 where its work is not judged."""
        if not is_judged:
            self.stillness.end()
            return 0.0
        return self.stillness.look(now_s, work_of(pid))


class Standstill:
    """Finds schedulers that a signal has stopped, or whose event loop has been in one round, for too long.

    Between two looks at most two periods count: if the host itself was suspended, no scheduler counts as hanging.
    """

    def __init__(self, file: Path, timeout_s: float, *, computes_here: bool = False) -> None:
        """timeout_s: how long a scheduler may be stopped, or stay in one round, at most.

        computes_here: the forward passes of the whole engine need processors of this node, and not a GPU, so that
        schedulers which all do nothing in a round hang.
        """
        self.period_s = max(0.1, min(1.0, timeout_s / 10))
        self._file = file
        self._stopped_limit_s = min(timeout_s, processes.STOPPED_S)
        # a kernel that is compiled for new shapes keeps a round longer than all before
        self._deadline = Deadline(timeout_s, floor_s=_LEAST_ROUND_S)
        self._computes_here = computes_here
        self._of_rounds = GroupStillness(timeout_s)
        self._looked_at = time.monotonic()
        self._progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        # for how long all that are in an exchange have stood still, at the last look; 0: none is, or one works
        self.exchange_still_s = 0.0

    def look(self, schedulers: Sequence[BaseProcess], first_rank: int) -> str | None:
        """A description of the schedulers that hang, or None. first_rank: the rank of the first scheduler."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, 2 * self.period_s)
        self._looked_at = now
        counts = np.fromfile(self._file, np.int64).tolist()
        still = []
        still_in_exchange_s = []
        still_in_round_s = []
        limit_s = self._deadline.limit_s
        for index, process in enumerate(schedulers):
            count = counts[index]
            progress = self._progress[index]
            progress.stopped_s += passed_s
            progress.same_s += passed_s
            if not processes.is_stopped(process.pid or 0):
                progress.stopped_s = 0.0
            if 0 < progress.count < count:
                self._deadline.observe(progress.same_s)
            is_in_round = 0 < count == progress.count
            if not is_in_round:
                progress.same_s = 0.0
            progress.count = count
            name = f"{first_rank + index} (pid {process.pid})"
            is_judged = count == _EXEMPT or (is_in_round and self._computes_here)
            still_s = progress.still_s(now, process.pid or 0, is_judged=is_judged)
            if count == _EXEMPT:
                still_in_exchange_s.append(still_s)
            elif count > 0:
                still_in_round_s.append(still_s)
            if count == _EXEMPT and still_s >= self._deadline.ceiling_s + PEERS_S:
                return f"engine scheduler {name} stands still in an exchange, for {still_s:.0f} s"
            if progress.stopped_s >= self._stopped_limit_s:
                return f"engine scheduler {name} was stopped by a signal, {self._stopped_limit_s:g} s ago"
            if progress.same_s >= limit_s + PEERS_S:
                still.append(name)
        # in one assignment: another thread reads it
        self.exchange_still_s = min(still_in_exchange_s, default=0.0)
        if still:
            return f"engine scheduler {', '.join(still)} has done nothing for {limit_s:g} s"
        are_all_in_round = 0 < len(still_in_round_s) == len(schedulers)
        if self._computes_here and are_all_in_round:
            return self._hang_in_round(now, still_in_round_s, schedulers, first_rank)
        return None

    def _hang_in_round(
        self,
        now_s: float,
        still_s: Sequence[float],
        schedulers: Sequence[BaseProcess],
        first_rank: int,
    ) -> str | None:
        """A description where no scheduler of the engine does anything, though all are in a round; or None.

        One that waits for a processor, on a busy machine, does not hang.
        """
        if not self._of_rounds.is_overdue(now_s, still_s):
            return None
        if any(processes.could_run(process.pid or 0) for process in schedulers):
            return None
        pids = enumerate((process.pid for process in schedulers), start=first_rank)
        names = ", ".join(f"{rank} (pid {pid})" for rank, pid in pids)
        return f"engine scheduler {names} has used no processor and moved no bytes for {min(still_s):.0f} s"
