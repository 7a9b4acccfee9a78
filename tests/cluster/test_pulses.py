"""For how long a worker has not answered its heartbeats, as whoever looks about once a period counts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import pulses
from megarl.cluster.pulses import Pulses


class SilentWorker:
    """In the place of a worker's handle: it is asked and never answers."""

    computes = False

    def pulse(self) -> str:
        return "asked"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake_clock = SimpleNamespace(now_s=100.0)
    fake_clock.monotonic = lambda: fake_clock.now_s
    monkeypatch.setattr(pulses, "time", fake_clock)
    # all that was asked waits for its answer
    monkeypatch.setattr(pulses.ray, "wait", lambda refs, **_: ([], refs))
    return fake_clock


def looked(pulses: Pulses, clock: SimpleNamespace, seconds: list[float]) -> float:
    worker: Any = SilentWorker()
    pulses.look([worker])
    for passed_s in seconds:
        clock.now_s += passed_s
        pulses.look([worker])
    return pulses.silence_s(worker)


def test_looks_that_are_a_little_early_count(clock: SimpleNamespace) -> None:
    assert looked(Pulses(60.0, period_s=1.0), clock, [0.95] * 8) == pytest.approx(7.6)


def test_looks_in_between_count_together_with_the_next(clock: SimpleNamespace) -> None:
    assert looked(Pulses(60.0, period_s=1.0), clock, [0.5] * 8) == pytest.approx(4.0)


def test_of_a_machine_that_was_suspended_a_period_counts(clock: SimpleNamespace) -> None:
    assert looked(Pulses(60.0, period_s=1.0), clock, [10_000.0]) == 1.0


def test_many_workers_are_asked_less_often_and_their_silence_is_as_long(
    clock: SimpleNamespace,
) -> None:
    workers: Any = [SilentWorker() for _ in range(400)]
    pulses = Pulses(60.0, period_s=1.0)
    for _ in range(9):
        pulses.look(workers)
        clock.now_s += 1.0
    assert pulses.silence_s(workers[0]) == pytest.approx(8.0), "two looks, four seconds apart"
    clock.now_s += 10_000.0
    pulses.look(workers)
    assert pulses.silence_s(workers[0]) == pytest.approx(9.0), "all were suspended"
