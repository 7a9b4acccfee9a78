"""What the run says of a phase, and when it says nothing, on planted evidence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megarl.cluster import hang_watch
from megarl.cluster.hang_evidence import ClusterView
from megarl.cluster.hang_watch import HangWatch
from megarl.diagnosis.evidence import Evidence, NodeEvidence, ProcessEvidence, WorkerEvidence
from megarl.diagnosis.phases import Phase, PhaseClock
from megarl.tracking.secrets import redacted
from megarl.types.conditions import RunningJob, TimedCall, WorkerCondition, WorkLoad

SECRET = "hf_0123456789abcdef"
NO_LOAD = WorkLoad()
JOB = WorkLoad(jobs=[RunningJob("tool", "ask", f"https://me:pass@host?key={SECRET}", 99.0, 71)])
Watch = Callable[..., tuple[HangWatch, PhaseClock, list[str]]]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watch]:
    """Makes a watch over one rank, whose share of a processor and load are as told."""
    planted: dict[str, Any] = {"cpu_share": 0.9, "load": NO_LOAD}

    def collected(view: ClusterView, reason: str, phase: Phase | None) -> Evidence:
        condition = WorkerCondition(1, [TimedCall("train", 40.0)], None, planted["load"])
        workers = [WorkerEvidence("training rank 0", "10.0.0.1", 1, True, condition)]
        processes = [ProcessEvidence(1, "", "training rank 0", True, "S", planted["cpu_share"])]
        return Evidence(reason, phase, 40.0, workers, processes, [NodeEvidence("10.0.0.1")])

    def make(clock: PhaseClock, **evidence: object) -> tuple[HangWatch, PhaseClock, list[str]]:
        planted.update(evidence)
        lines: list[str] = []
        view = ClusterView("10.0.0.1", [], [], list, may_ask_ray=False)
        return HangWatch(clock, tmp_path, lines.append, lambda: view, redacted), clock, lines

    with patch.object(hang_watch, "collect", collected):
        yield make


def looks(watch: HangWatch, num: int) -> None:
    """Let the watch look so often, whatever the phase does."""
    done = iter([False] * num)
    with patch.object(watch._is_over, "wait", lambda _: next(done, True)):
        watch._run()


def test_a_slow_phase_is_no_hang(watched: Watch, tmp_path: Path):
    watch, clock, lines = watched(PhaseClock(1e-9, 600.0))
    with clock.phase(0, "rollout"):
        pass
    with clock.phase(1, "rollout"):
        looks(watch, 2)
    file = tmp_path / "hangs" / "step_1_rollout.txt"
    assert lines == [
        "SLOW: rollout has taken 40 s (longest before: 0 s); every process computes: training rank 0; "
        f"the rest is in {file}"
    ]
    assert file.exists()


def test_a_request_and_an_end_say_what_they_are(watched: Watch):
    watch, clock, lines = watched(PhaseClock(0.0, 600.0))
    asked = iter([True])
    with clock.phase(1, "rollout"):
        with patch.object(hang_watch, "take_report_request", lambda: next(asked, False)):
            looks(watch, 2)
        watch.before_end("rank 0 has not answered for 8 s")
    assert [line.partition("; the rest")[0] for line in lines] == [
        "asked for by SIGUSR2: every process computes: training rank 0",
        "HANG: rank 0 has not answered for 8 s",
    ]


@pytest.mark.parametrize(("cpu_share", "num"), [(0.9, 0), (0.0, 1)])
def test_a_first_phase_is_told_only_where_it_stands_still(
    watched: Watch, cpu_share: float, num: int
):
    watch, clock, lines = watched(PhaseClock(None, 1e-9), cpu_share=cpu_share)
    with clock.phase(1, "rollout"):
        looks(watch, 5)
    assert len(lines) == num
    assert all(line.startswith("HANG: training rank 0 ") for line in lines)


def test_neither_line_nor_page_has_a_secret(
    watched: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(os.environ, "HF_TOKEN", SECRET)
    watch, clock, lines = watched(PhaseClock(1e-9, 600.0), load=JOB)
    with clock.phase(1, "rollout"):
        looks(watch, 1)
    page = (tmp_path / "hangs" / "step_1_rollout.txt").read_text()
    for text in (page, *lines):
        assert "https://(withheld)@host?key=(withheld)" in text
        assert SECRET not in text and "pass" not in text
