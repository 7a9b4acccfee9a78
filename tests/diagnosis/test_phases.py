"""For how long a phase may last: as set, or as the run has taught."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.diagnosis import phases
from megarl.diagnosis.phases import PhaseClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(now_s=100.0)
    fake.monotonic = lambda: fake.now_s
    monkeypatch.setattr(phases, "time", fake)
    return fake


def last(run: PhaseClock, clock: SimpleNamespace, name: str, seconds: float) -> None:
    with run.phase(1, name):
        clock.now_s += seconds


def test_a_limit_is_five_times_the_longest_phase_of_the_name_so_far(clock: SimpleNamespace):
    run = PhaseClock(limit_s=None, first_s=600.0)
    assert run.limit_s("train") == 600.0
    last(run, clock, "train", 40.0)
    last(run, clock, "train", 30.0)
    last(run, clock, "reshard", 1.0)
    assert [run.limit_s(name) for name in ("train", "reshard", "rollout")] == [200.0, 60.0, 600.0]


def test_a_phase_is_overdue_after_its_limit(clock: SimpleNamespace):
    run = PhaseClock(limit_s=5.0, first_s=600.0)
    assert run.overdue() is None
    with run.phase(4, "rollout"):
        clock.now_s += 4.9
        assert run.overdue() is None
        clock.now_s += 0.1
        overdue = run.overdue()
        assert overdue and str(overdue) == "phase rollout of step 4"
    assert run.current is None and run.overdue() is None


def test_a_phase_that_fails_teaches_nothing(clock: SimpleNamespace):
    run = PhaseClock(limit_s=None, first_s=600.0)
    with pytest.raises(ValueError), run.phase(1, "train"):
        clock.now_s += 500.0
        raise ValueError
    assert run.limit_s("train") == 600.0 and run.current is None


def test_nobody_knows_how_long_the_first_phase_of_a_name_takes(clock: SimpleNamespace):
    run = PhaseClock(limit_s=None, first_s=600.0)
    with run.phase(1, "rollout"):
        clock.now_s += 1300.0
        phase = run.overdue()
        assert phase and phase == run.current and run.num_limits(phase) == 2
        assert not run.has_limit("rollout") and run.longest_s("rollout") is None
    assert run.has_limit("rollout") and run.longest_s("rollout") == 1300.0
    assert PhaseClock(limit_s=5.0, first_s=600.0).has_limit("rollout")


def test_zero_turns_the_limit_off(clock: SimpleNamespace):
    run = PhaseClock(limit_s=0.0, first_s=600.0)
    with run.phase(1, "rollout"):
        clock.now_s += 1e6
        assert run.overdue() is None
