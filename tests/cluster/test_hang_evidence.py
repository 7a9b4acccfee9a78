"""What the answers of Ray's servers say about the nodes of a run, and that nobody asks Ray after its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl.cluster import hang_evidence
from megarl.cluster.hang_evidence import ClusterView
from megarl.cluster.hang_watch import HangWatch
from megarl.diagnosis.phases import PhaseClock

_WAIT_S = 60.0


def test_a_node_that_ray_has_lost_has_no_full_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves out a resource that is used up, and a node of which it knows nothing."""
    store = {"object_store_memory": 8.0}
    monkeypatch.setattr(
        hang_evidence,
        "total_resources_per_node",
        lambda: {"half": store, "full": store, "lost": store, "none": {}},
    )
    monkeypatch.setattr(
        hang_evidence,
        "available_resources_per_node",
        lambda: {"half": {"object_store_memory": 4.0}, "full": {"CPU": 1.0}, "none": {}},
    )
    assert hang_evidence._store_shares() == {"half": 0.5, "full": 1.0}


def test_the_end_of_a_run_waits_for_a_report_in_progress(tmp_path: Path) -> None:
    """It asks Ray, which ends next."""
    has_begun = threading.Event()
    may_end = threading.Event()
    ended: list[bool] = []

    def view() -> ClusterView:
        has_begun.set()
        ended.append(may_end.wait(_WAIT_S))
        raise RuntimeError("it has no cluster")

    clock = PhaseClock(0.01, 0.01)
    watch = HangWatch(clock, tmp_path, lambda _: None, view, str)
    watch.end()
    watch = HangWatch(clock, tmp_path, lambda _: None, view, str)
    watch.start()
    with clock.phase(1, "train"):
        assert has_begun.wait(_WAIT_S)
        threading.Timer(0.5, may_end.set).start()
        watch.end()
        assert ended == [True]


def test_a_call_without_a_session_starts_none() -> None:
    code = "from megarl.cluster import ray_environment\nimport ray\nray.wait([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Ray has not been started yet" in done.stderr
