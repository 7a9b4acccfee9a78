"""What calls of services meet in worker processes, as their parent counts and tells it."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megarl.isolation.child import SERVICE
from megarl.isolation.service import EVENTS
from megarl.printable import OutputFailed, Say, one_line, show
from megarl.types.worker_faults import ServiceFaults

_LONGEST_TEXT = 100  # of a name or a reason; users' functions choose them


@dataclass
class _Tally:
    """Of one service. down: the processes that hold calls back, since began_s; counted_s: the seconds before count."""

    counts: Counter[str] = field(default_factory=Counter)  # of `ServiceFaults`
    down_s: float = 0.0
    reason: str = ""
    down: set[object] = field(default_factory=set)
    began_s: float = 0.0
    counted_s: float = 0.0


class ServiceLog:
    """Counts, and prints a line when a service is found down and one when it answers again. Any thread may use it."""

    def __init__(self, where: str, now: Callable[[], float], say: Say | None = None) -> None:
        """where: the recipe key that names what calls the services. say: None: lines go to standard error."""
        self._where = where
        self._now = now
        self._say = say or _say
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._lock = threading.Lock()

    def take_in(self, process: object, message: Sequence[object]) -> bool:
        """Whether a message of a process tells what a call has met, which then is counted."""
        match message:
            case [kind, str(name), str(event), str(words)] if kind == SERVICE and event in EVENTS:
                with self._lock:
                    self._count(process, name[:_LONGEST_TEXT], event, words[:_LONGEST_TEXT])
                return True
        return False

    def forget(self, process: object) -> None:
        """A process has ended: it holds no call back any more."""
        with self._lock:
            for tally in self._tallies.values():
                self._remove(process, tally)

    def take(self) -> tuple[ServiceFaults, ...]:
        """What has been counted since the last call, of each service."""
        with self._lock:
            faults = [self._take(name, tally) for name, tally in self._tallies.items()]
            for name in [name for name, tally in self._tallies.items() if not tally.down]:
                del self._tallies[name]
        return tuple(faults)

    def _count(self, process: object, name: str, event: str, words: str) -> None:
        tally = self._tallies[name]
        match event:
            case "retry":
                tally.counts["retries"] += 1
            case "lost":
                tally.counts["lost"] += 1
            case "down":
                self._add(process, name, tally, words)
            case "up":
                if self._remove(process, tally):
                    seconds = self._now() - tally.began_s
                    self._say(f"{self._where}: {name} answers again, after {seconds:.0f} s")

    def _add(self, process: object, name: str, tally: _Tally, reason: str) -> None:
        if not tally.down:
            tally.counts["outages"] += 1
            tally.reason = tally.reason or reason
            tally.began_s = self._now()
            tally.counted_s = tally.began_s
            self._say(
                f"{self._where}: {name} does not answer ({reason}); calls wait for it, and fail at once when it "
                f"has been down for as long as a call may take"
            )
        tally.down.add(process)

    def _remove(self, process: object, tally: _Tally) -> bool:
        """Whether the outage has ended, because this was the last process that held calls back."""
        if process not in tally.down:
            return False
        tally.down.remove(process)
        if tally.down:
            return False
        tally.counts["recoveries"] += 1
        tally.down_s += self._now() - tally.counted_s
        return True

    def _take(self, name: str, tally: _Tally) -> ServiceFaults:
        if tally.down:
            now_s = self._now()
            tally.down_s += now_s - tally.counted_s
            tally.counted_s = now_s
        faults = ServiceFaults(name, down_s=tally.down_s, reason=tally.reason, **tally.counts)
        tally.counts.clear()
        tally.down_s = 0.0
        return faults


def _say(line: str) -> None:
    with suppress(OutputFailed):
        show(one_line(line), sys.stderr)
