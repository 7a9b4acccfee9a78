"""Who stands still is told from who works on, by counters and process states; time counts only while somebody looks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.stillness import Work
from megarl.rollout.sglang import loop_counts
from megarl.rollout.sglang.loop_counts import PEERS_S, LoopCounter, Standstill, make_counter_file

BOUND_S = 20.0


class Clock:
    """In the place of `time`: it goes on when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(loop_counts, "time", fake_clock)
    return fake_clock


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    yield children
    for child in children:
        child.kill()
        child.communicate()


def looks(
    standstill: Standstill, clock: Clock, processes: Any, seconds: float, step_s: float = 1.0
) -> list[str]:
    """What is said in so many seconds, looked at every step_s."""
    lines = []
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        lines.append(standstill.look(processes, 4))
    return [line for line in lines if line]


def test_who_stays_in_a_round_is_named_and_who_is_exempt_is_not(
    tmp_path: Path, clock: Clock, sleepers: Any
) -> None:
    make_counter_file(tmp_path / "rounds", 2)
    first, second = (LoopCounter(tmp_path / "rounds", index) for index in range(2))
    standstill = Standstill(tmp_path / "rounds", BOUND_S)
    assert looks(standstill, clock, sleepers, 10 * BOUND_S) == [], "a start may take its time"
    first.count()
    with second.exempt():
        first.count()
        assert looks(standstill, clock, sleepers, BOUND_S) == []
    for _ in range(10):
        second.count()
        lines = looks(standstill, clock, sleepers, BOUND_S / 2)
        if lines:
            break
    assert (
        lines[0] == f"engine scheduler 4 (pid {sleepers[0].pid}) has done nothing for {BOUND_S:g} s"
    )
    for counter in (first, second):
        counter.count()
    assert looks(standstill, clock, sleepers, BOUND_S) == [], "both go on"


def test_who_is_exempt_and_does_nothing_is_named_once_its_peers_have_given_up(
    tmp_path: Path, clock: Clock, sleepers: Any
) -> None:
    make_counter_file(tmp_path / "rounds", 2)
    counter = LoopCounter(tmp_path / "rounds", 1)
    counter.count()
    standstill = Standstill(tmp_path / "rounds", BOUND_S)
    with counter.exempt():
        assert looks(standstill, clock, sleepers, BOUND_S) == []
        assert standstill.exchange_still_s == BOUND_S - 1, "others may ask before that"
        lines = looks(standstill, clock, sleepers, 2 * PEERS_S)
    seconds = round(BOUND_S + PEERS_S)
    who = f"engine scheduler 5 (pid {sleepers[1].pid})"
    assert lines[0] == f"{who} stands still in an exchange, for {seconds} s"
    assert looks(standstill, clock, sleepers, BOUND_S) == [], "it goes on"
    assert standstill.exchange_still_s == 0.0


def test_a_scheduler_that_works_in_an_exchange_is_the_progress_of_its_engine(
    tmp_path: Path, clock: Clock, sleepers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_counter_file(tmp_path / "rounds", 2)
    counters = [LoopCounter(tmp_path / "rounds", index) for index in range(2)]
    standstill = Standstill(tmp_path / "rounds", BOUND_S)
    work = {sleepers[0].pid: 0.0, sleepers[1].pid: 0.0}
    monkeypatch.setattr(loop_counts, "work_of", lambda pid: Work(work[pid], 0))
    with counters[0].exempt(), counters[1].exempt():
        for _ in range(5):
            work[sleepers[1].pid] += 1.0
            looks(standstill, clock, sleepers, 1)
        assert standstill.exchange_still_s == 0.0
        looks(standstill, clock, sleepers, 3)
        assert standstill.exchange_still_s == 3.0


def test_an_engine_whose_schedulers_are_not_there_yet_starts(tmp_path: Path, clock: Clock) -> None:
    make_counter_file(tmp_path / "rounds", 1)
    standstill = Standstill(tmp_path / "rounds", BOUND_S, computes_here=True)
    assert looks(standstill, clock, [], 10 * BOUND_S) == []


@pytest.mark.parametrize("waits_for_processor", [False, True])
def test_an_engine_that_computes_nothing_in_a_forward_pass_hangs(
    tmp_path: Path,
    clock: Clock,
    sleepers: Any,
    monkeypatch: pytest.MonkeyPatch,
    waits_for_processor: bool,
) -> None:
    """One of its schedulers that computes is the progress of the others, which wait for it.

    Where a scheduler gets no processor, because others have it, nobody hangs.
    """
    monkeypatch.setattr(loop_counts.processes, "could_run", lambda pid: waits_for_processor)
    make_counter_file(tmp_path / "rounds", 2)
    counters = [LoopCounter(tmp_path / "rounds", index) for index in range(2)]
    standstill = Standstill(tmp_path / "rounds", 60.0, computes_here=True)
    work = {sleepers[0].pid: 0.0, sleepers[1].pid: 0.0}
    monkeypatch.setattr(loop_counts, "work_of", lambda pid: Work(work[pid], 0))
    for _ in range(30):
        for counter in counters:
            counter.count()
        assert looks(standstill, clock, sleepers, 1) == []
    for _ in range(20):
        work[sleepers[1].pid] += 1.0
        assert looks(standstill, clock, sleepers, 1) == []
    lines = looks(standstill, clock, sleepers, 15)
    if waits_for_processor:
        assert lines == []
        return
    who = f"engine scheduler 4 (pid {sleepers[0].pid}), 5 (pid {sleepers[1].pid})"
    assert lines[0].startswith(f"{who} has used no processor and moved no bytes for ")
    for counter in counters:
        counter.count()
    assert looks(standstill, clock, sleepers, 5) == []


def test_who_is_stopped_is_named_before_its_peers(
    tmp_path: Path, clock: Clock, sleepers: Any
) -> None:
    make_counter_file(tmp_path / "rounds", 2)
    for index in range(2):
        LoopCounter(tmp_path / "rounds", index).count()
    standstill = Standstill(tmp_path / "rounds", BOUND_S)
    looks(standstill, clock, sleepers, 1)
    sleepers[1].send_signal(signal.SIGSTOP)
    while not loop_counts.processes.is_stopped(sleepers[1].pid):
        pass
    lines = looks(standstill, clock, sleepers, BOUND_S + PEERS_S - 2)
    assert set(lines) == {
        f"engine scheduler 5 (pid {sleepers[1].pid}) was stopped by a signal, 6 s ago"
    }


def test_a_machine_that_slept_is_no_standstill(tmp_path: Path, clock: Clock, sleepers: Any) -> None:
    make_counter_file(tmp_path / "rounds", 2)
    counter = LoopCounter(tmp_path / "rounds", 0)
    counter.count()
    standstill = Standstill(tmp_path / "rounds", BOUND_S)
    looks(standstill, clock, sleepers, 1)
    assert looks(standstill, clock, sleepers, 10_000, step_s=10_000) == []
