"""How far the clock of another node is from this one's, by round trips, and how wrong that may be. Pure, but `measure`.

A reading that another process takes between two readings of this one's clock was taken at their middle, to within half
of the time between them: the quickest of several round trips is the best (Cristian 1989). Two clocks also drift apart,
so that a step has a measurement before it and one after it, and its times are shifted by what lies between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ROUND_TRIPS = 8


@dataclass(frozen=True)
class Offset:
    """What is added to a time of another clock to get this one's. at_ns: by the other clock; error_ns: the most that
    the offset is wrong."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class Alignment:
    """From another clock to this one, by an offset before and one after what is aligned."""

    first: Offset
    last: Offset

    @property
    def error_ns(self) -> int:
        """The most by which an aligned time between the two offsets is wrong, of clocks that drift evenly."""
        return max(self.first.error_ns, self.last.error_ns)

    def aligned(self, at_ns: int) -> int:
        """A time of the other clock by this one."""
        passed_ns = self.last.at_ns - self.first.at_ns
        if passed_ns <= 0:
            return at_ns + self.last.offset_ns
        drift_ns = self.last.offset_ns - self.first.offset_ns
        return at_ns + self.first.offset_ns + drift_ns * (at_ns - self.first.at_ns) // passed_ns


SAME_OFFSET = Offset(0, 0, 0)
SAME_CLOCK = Alignment(SAME_OFFSET, SAME_OFFSET)


def measure(
    read_other: Callable[[], int],
    read_own: Callable[[], int] = time.monotonic_ns,
    round_trips: int = ROUND_TRIPS,
) -> Offset:
    """The offset of another clock, from the quickest of some round trips. Both functions return nanoseconds."""
    trips = []
    for _ in range(round_trips):
        sent_ns = read_own()
        other_ns = read_other()
        returned_ns = read_own()
        trips.append((returned_ns - sent_ns, sent_ns, other_ns))
    passed_ns, sent_ns, other_ns = min(trips)
    # rounded up: half of an odd number of nanoseconds is no less wrong
    return Offset(other_ns, sent_ns + passed_ns // 2 - other_ns, (passed_ns + 1) // 2)
