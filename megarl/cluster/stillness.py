"""Whether processes that compute make progress: by the processor time and the bytes of each. Linux.

A process that waits for ever, because a thread of it never began or a peer is lost, may answer heartbeats all the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.deadline import Deadline

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# a process that does less has done nothing: its threads look around now and then
_LEAST_CPU_SHARE = 0.03
_LEAST_BYTES = 2**12
# in a shorter time the work of a moment, which Ray's own threads do now and then, would count as progress
_LEAST_LOOK_S = 4.0
# of a longer time between two looks the least one counts: the process itself may have been stopped
_LONGEST_LOOK_S = 20.0
_LEARNT_EVERY_S = 1.0


@dataclass(frozen=True)
class Work:
    """What a process and its children have done: seconds of processors, and bytes that were read and written."""

    cpu_s: float
    num_bytes: int


def work_of(pid: int, spared_threads: Collection[int] = ()) -> Work:
    """Of a process from its start, without the processor time of some threads; its children are counted, too."""
    process = Path(f"/proc/{pid}")
    cpu_s = _cpu_s(process, with_ended_children=True)
    num_bytes = 0
    # what ends meanwhile counts for nothing
    with suppress(OSError):
        fields = (process / "io").read_text().split()
        # of what is read, that from disks: the looks themselves read /proc
        num_bytes = int(fields[fields.index("read_bytes:") + 1])
        num_bytes += int(fields[fields.index("wchar:") + 1])
    for thread in spared_threads:
        cpu_s -= _cpu_s(process / "task" / str(thread), with_ended_children=False)
    for child in _children(process):
        work = work_of(child)
        cpu_s += work.cpu_s
        num_bytes += work.num_bytes
    return Work(cpu_s, num_bytes)


def _cpu_s(process: Path, *, with_ended_children: bool) -> float:
    """Of a process or a thread; 0 where it has ended."""
    with suppress(OSError):
        # the name, in brackets, may have spaces
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks = fields[11:15] if with_ended_children else fields[11:13]
        return sum(map(int, ticks)) / _TICKS_PER_S
    return 0.0


def _children(process: Path) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):
        for thread in (process / "task").iterdir():
            with suppress(OSError):
                pids += map(int, (thread / "children").read_text().split())
    return pids


def threads() -> list[int]:
    """Those of this process, by number."""
    return [int(name) for name in os.listdir("/proc/self/task")]


class Stillness:
    """For how long a process has done nothing, as it judges itself at each look. Pure."""

    def __init__(self) -> None:
        self._seen_at_s = 0.0
        self._seen: Work | None = None
        self._still_s = 0.0

    def look(self, now_s: float, work: Work) -> float:
        """The seconds until now in which it has stood still; work: what it has done since it began."""
        if self._seen is None:
            self._see(now_s, work)
            return 0.0
        passed_s = now_s - self._seen_at_s
        if passed_s > _LONGEST_LOOK_S:
            passed_s = _LEAST_LOOK_S
        least_cpu_s = _LEAST_CPU_SHARE * max(passed_s, _LEAST_LOOK_S)
        has_computed = work.cpu_s - self._seen.cpu_s >= least_cpu_s
        has_moved_bytes = work.num_bytes - self._seen.num_bytes >= _LEAST_BYTES
        still_s = self._still_s + passed_s
        if has_computed or has_moved_bytes:
            still_s = 0.0
        elif passed_s < _LEAST_LOOK_S:
            # counted together with the next look
            return still_s
        self._still_s = still_s
        self._see(now_s, work)
        return still_s

    def _see(self, now_s: float, work: Work) -> None:
        self._seen_at_s = now_s
        self._seen = work

    def end(self) -> None:
        """It has done what it was asked for."""
        self._seen = None
        self._still_s = 0.0


class GroupStillness:
    """For how long all processes that are waited for have stood still together, and how long that may last. Pure.

    One that computes while its peers wait for it is the progress of all.
    """

    def __init__(self, ceiling_s: float) -> None:
        """ceiling_s: the longest, while little is known."""
        self._deadline = Deadline(ceiling_s)
        self._seen_at_s = -math.inf
        self._still_s = 0.0
        # what was still before had a reason that is gone
        self._since_s = -math.inf

    def is_overdue(self, now_s: float, still_s: Sequence[float]) -> bool:
        """Whether it lasts longer than what has ended lets expect; still_s: of each process, until about now."""
        if now_s - self._seen_at_s >= _LEARNT_EVERY_S:
            before_s = self._still_s
            self._still_s = max(0.0, min(*still_s, now_s - self._since_s))
            self._seen_at_s = now_s
            if self._still_s <= before_s:
                self._deadline.observe(before_s)
        return self._still_s >= self._deadline.limit_s

    def forget(self, now_s: float) -> None:
        """A process is lost, or all are called back: that they stood still until now tells nothing."""
        self._still_s = 0.0
        self._since_s = now_s
