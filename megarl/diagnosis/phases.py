"""Which phase a run is in, and for how long a phase may last before a report says what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_FACTOR = 5.0  # of the longest phase of the kind that has ended
_FLOOR_S = 60.0


@dataclass(frozen=True)
class Phase:
    """A phase of a step that has begun. began_s: by `time.monotonic`."""

    step: int
    name: str
    began_s: float

    def __str__(self) -> str:
        return f"phase {self.name} of step {self.step}"


class PhaseClock:
    """The phase that a run is in; one thread sets it, others may read.

    A phase is overdue after a set time, or after five times the longest of its name that has ended, at least a minute.
    Before one of its name has ended nobody knows how long a healthy one takes: it is due for a look, and no more.
    """

    def __init__(self, limit_s: float | None, first_s: float) -> None:
        """limit_s: of every phase; None: learnt; 0: none is overdue.

        first_s: of a phase before any of its name has ended.
        """
        self._limit_s = limit_s
        self._first_s = first_s
        self._longest_s: dict[str, float] = {}
        self.current: Phase | None = None
        self.failed: Phase | None = None  # the last one, where it has ended by an error

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """The phase lasts as long as the block; one that fails teaches nothing."""
        outer = self.current
        begun = Phase(step, name, time.monotonic())
        self.current = begun
        self.failed = None
        try:
            yield
        except BaseException:
            self.failed = begun
            raise
        else:
            seconds = time.monotonic() - begun.began_s
            self._longest_s[name] = max(seconds, self._longest_s.get(name, 0.0))
        finally:
            self.current = outer

    def limit_s(self, name: str) -> float:
        """For how long a phase of the name may last."""
        if self._limit_s is not None:
            return self._limit_s
        if name not in self._longest_s:
            return self._first_s
        return max(_FLOOR_S, _FACTOR * self._longest_s[name])

    def longest_s(self, name: str) -> float | None:
        """Of the phases of the name that have ended; None before the first."""
        return self._longest_s.get(name)

    def has_limit(self, name: str) -> bool:
        """Whether a phase that lasts longer than `limit_s` is unusual, by what is set or was learnt."""
        return self._limit_s is not None or name in self._longest_s

    def overdue(self) -> Phase | None:
        """The current phase where it has outlived its limit."""
        phase = self.current
        if phase and self._limit_s != 0 and self.num_limits(phase):
            return phase
        return None

    def num_limits(self, phase: Phase) -> int:
        """How often the limit of the phase has passed since it began."""
        return int((time.monotonic() - phase.began_s) / self.limit_s(phase.name))
