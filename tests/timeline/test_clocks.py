"""The offset of another node's clock: simulated clocks and networks, of which the truth is known."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from megarl.timeline.clocks import SAME_CLOCK, Alignment, Offset, measure

_S = 1_000_000_000


class Network:
    """Two clocks and messages between them, whose times are random in both directions."""

    def __init__(self, seed: int, ahead_ns: int, drift: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._ahead_ns = ahead_ns
        self._drift = drift
        self.now_ns = 5 * _S

    def own(self) -> int:
        return self.now_ns

    def other_at(self, at_ns: int) -> int:
        return round(at_ns + self._ahead_ns + self._drift * at_ns)

    def ask_other(self) -> int:
        self.now_ns += round(self._random.expovariate(1 / 300_000))
        read = self.other_at(self.now_ns)
        self.now_ns += round(self._random.expovariate(1 / 100_000))
        return read


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead_ns", [0, -70_000 * _S, 123_456_789_123])
def test_the_stated_error_holds_though_ways_take_unequal_times(seed: int, ahead_ns: int) -> None:
    network = Network(seed, ahead_ns)
    offset = measure(network.ask_other, network.own)
    assert abs(offset.offset_ns + ahead_ns) <= offset.error_ns


def test_the_quickest_round_trip_is_the_one_that_counts() -> None:
    trips: Iterator[tuple[int, int]] = iter([(0, 900), (1000, 1020), (2000, 2500)])
    moments: list[int] = []

    def own() -> int:
        if not moments:
            moments.extend(next(trips))
        return moments.pop(0)

    reads = iter([7, 5010, 9])
    assert measure(lambda: next(reads), own, round_trips=3) == Offset(5010, -4000, 10)


def test_half_of_an_odd_time_is_not_rounded_in_favour_of_the_error() -> None:
    moments = iter([0, 5])
    offset = measure(lambda: 100, lambda: next(moments), round_trips=1)
    assert (offset.offset_ns, offset.error_ns) == (-98, 3)


def test_times_between_two_measurements_follow_the_drift() -> None:
    """Of 100 parts in a million, as bad quartz has, over a step of 1000 s: a tenth of a second."""
    network = Network(seed=1, ahead_ns=17 * _S, drift=1e-4)
    first = measure(network.ask_other, network.own)
    moments = [network.now_ns + part * 100 * _S for part in range(11)]
    network.now_ns = moments[-1]
    alignment = Alignment(first, measure(network.ask_other, network.own))
    assert abs(alignment.last.offset_ns - alignment.first.offset_ns) > _S // 20
    for moment in moments:
        aligned = alignment.aligned(network.other_at(moment))
        assert abs(aligned - moment) <= alignment.error_ns + 100, "and what rounding takes"


def test_one_measurement_is_enough_and_the_own_clock_needs_none() -> None:
    offset = Offset(at_ns=5, offset_ns=-3, error_ns=2)
    assert Alignment(offset, offset).aligned(100) == 97
    assert (SAME_CLOCK.aligned(123), SAME_CLOCK.error_ns) == (123, 0)
