"""Phases that do not end, on a real Ray session: the page's first line names what was planted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import ray

from megarl.cluster import hang_evidence, hang_watch, local_ray
from megarl.cluster.actor import Ref, Worker
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.hang_watch import HangWatch
from megarl.cluster.pulses import Pulses
from megarl.cluster.ray_session import Cluster
from megarl.device import DEVICE
from megarl.diagnosis.evidence import SCHEDULER
from megarl.diagnosis.phases import PhaseClock
from megarl.diagnosis.stacks import processes_of
from megarl.disk import has_open_calls, while_answering
from megarl.tracking.secrets import redacted
from megarl.types import Silence
from tests.ray_nodes import RayNodes
from tests.stalling_disk import stalling_disk

pytestmark = pytest.mark.slow

PYTHONPATH = f"{Path(__file__).parents[2]}:{Path(__file__).parent}"
STORE_BYTES = 2**27
PART_BYTES = 2**22
LIMIT_S = 1.0
BOUND_S = 5.0  # of a silence
REPORT_S = 60  # for which a test waits; the page's own limits add up to less than 15 s
PROMISED_S = 15.0  # from a deadline to the line, where the machine has time for it
FULL_SHARE = 0.9
PROBE_S = 0.2
QUIET_SHARE = 0.9  # of a processor, before a report and after it


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
        with patch.object(local_ray, "_OBJECT_STORE_BYTES", STORE_BYTES), Cluster(2) as session:
            monkeypatch.setattr(session, "_pulses", Pulses(BOUND_S))
            yield session


# A run on two nodes, whose second raylet is stopped while both ranks are waited for.
_TWO_NODES = """
import os, signal, sys
from pathlib import Path
import psutil
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.diagnosis.evidence import SCHEDULER
from megarl.diagnosis.phases import PhaseClock
from megarl.diagnosis.stacks import processes_of
from megarl.tracking.secrets import redacted

def tell(*words):
    print("run:", *words, flush=True)

clock = PhaseClock(1.0, 600.0)
session = Cluster(2, node_gpus=1, say=tell)
session.watch_phases(clock, Path(sys.argv[1]), redacted)
with session as cluster:
    ranks = [cluster.worker(f"training rank {rank}", rank) for rank in range(2)]
    started = {worker.start("tests.cluster.idle:Idle", 0): worker.name for worker in ranks}
    pids = cluster.gather(started)
    os.kill(psutil.Process(pids[1]).ppid(), signal.SIGSTOP)
    try:
        with clock.phase(1, "train"):
            cluster.gather({worker.call("hang"): worker.name for worker in ranks})
    except WorkerFailed as failed:
        tell(failed)
"""


@pytest.mark.nightly
def test_a_raylet_of_another_node_that_does_not_answer_is_named(tmp_path: Path):
    """It is stopped; a worker there ends it with its node after some seconds, and the page comes first."""
    with (
        tempfile.TemporaryDirectory(prefix="n-", dir="/tmp") as disk,
        RayNodes(tmp_path, Path(disk), gpus=1) as nodes,
    ):
        nodes.start("127.0.0.2", "127.0.0.3")
        environment = nodes.environment() | {"RAY_ADDRESS": nodes.address}
        command = [sys.executable, "-c", _TWO_NODES, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    page = (tmp_path / "hangs" / "step_1_train.txt").read_text()
    first, _, rest = page.partition("\n")
    assert re.fullmatch(
        r"Ray's raylet on node 127\.0\.0\.3 \(pid \d+\): a signal has stopped the process .*", first
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("run: ")]
    assert lines[0].startswith(f"run: HANG: {first}; the rest is in "), done.stderr
    assert lines[1].startswith("run: training rank 1: its process died")
    assert rest.count("Idle.hang (tests/cluster/idle.py:") == 2, "the stacks of both nodes"


@dataclass
class Watched:
    """A cluster whose phases are watched, and what is said."""

    cluster: Cluster
    clock: PhaseClock
    watch: HangWatch
    folder: Path
    lines: list[str]
    said_s: list[float]
    record_property: Callable[[str, object], None]

    def page_of(self, calls: Mapping[Ref, str], name: str) -> list[str]:
        """The lines of the page that is written while the calls of a phase are waited for."""
        file = self.folder / "hangs" / f"step_1_{name}.txt"
        share = _processor_share()
        with self.clock.phase(1, name):
            deadline_s = time.monotonic() + LIMIT_S
            for _ in range(REPORT_S):
                ended = self.cluster.await_any(calls, patience_s=1.0)
                assert not ended, "it hangs"
                if self.lines and file.exists() and file.read_text():
                    break
        (line,) = self.lines
        late_s = self.said_s[-1] - deadline_s
        share = min(share, _processor_share())
        self.record_property(f"seconds from the deadline of {name} to the line", late_s)
        print(f"{name}: the line came {late_s:.1f} s after the deadline; processor: {share:.0%}")
        assert late_s < PROMISED_S or share < QUIET_SHARE
        page = file.read_text().splitlines()
        assert line == f"HANG: {page[0]}; the rest is in {file}"
        return page


def _processor_share() -> float:
    """How much of a processor a thread gets that wants all of one: less where others work, too."""
    began_s = time.monotonic()
    used_s = time.thread_time()
    while time.monotonic() - began_s < PROBE_S:
        pass
    return (time.thread_time() - used_s) / (time.monotonic() - began_s)


@pytest.fixture
def watched(
    cluster: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Watched]:
    lines: list[str] = []
    said_s: list[float] = []

    def say(line: str) -> None:
        said_s.append(time.monotonic())
        lines.append(line)

    clock = PhaseClock(LIMIT_S, first_s=600.0)
    watch = HangWatch(clock, tmp_path, say, cluster._view, redacted)
    watch.start()
    yield Watched(cluster, clock, watch, tmp_path, lines, said_s, record_property)
    watch.end()


def test_a_rank_that_skips_a_collective_is_named(watched: Watched, tmp_path: Path):
    """Unverified on a GPU: look first where the rank that waits is over NCCL, which is no collective's function."""
    cluster = watched.cluster
    ranks = [cluster.worker(f"training rank {rank}", rank) for rank in range(2)]
    started = {
        worker.start("hanging:Rank", rank, tmp_path / "meeting"): worker.name
        for rank, worker in enumerate(ranks)
    }
    cluster.gather(started)
    calls = {worker.call("train", 1): worker.name for worker in ranks}
    (skipped,) = cluster.await_any(calls)
    page = watched.page_of({ref: calls[ref] for ref in calls if ref is not skipped}, "train")
    by_stacks = (
        r"training rank 1 is not in the all_reduce, called by Rank\.train \(tests/cluster/hanging\.py:\d+\) in which "
        r"training rank 0 waits; training rank 1 has no call open, has finished train \d+ s ago, "
    )
    by_calls = (
        "training rank 0 is the last: training rank 1 has finished; training rank 0 in train for "
    )
    assert re.match(by_calls if DEVICE == "cuda" else by_stacks, page[0])
    text = "\n".join(page)
    assert "-> training rank 0 (pid " in text and "the longest train for " in text
    assert "controller on " in text and "await_any (megarl/cluster/calls.py:" in text
    for rank in ranks:
        cluster.end(rank)


def test_a_sleeping_reward_and_a_hung_tool_are_named_with_their_rows(
    watched: Watched, tmp_path: Path
):
    cluster = watched.cluster
    engine = cluster.worker("engine 0", 0)
    cluster.gather({engine.start("hanging:Scorer", tmp_path): "engine 0"})
    scored = engine.call("score")
    page = watched.page_of({scored: "engine 0"}, "rollout")
    assert re.fullmatch(
        r"reward function hung_functions:score \(pid \d+\) has been running for \d+ s on the response 'it is 42' "
        r"to the row '.*6 \* 7.*', for engine 0",
        page[0],
    )
    assert any("_wait_for (tests/cluster/hung_functions.py:" in line for line in page)
    (tmp_path / "reward").touch()
    cluster.gather({scored: "engine 0"})
    watched.lines.clear()
    called = engine.call("call_tool")
    page = watched.page_of({called: "engine 0"}, "eval")
    assert re.fullmatch(
        r"tool look_up \(pid \d+\) has been running for \d+ s on \[\{'word': 'Atlantis'\}\] of an episode of the "
        r"row \{'question': 'where\?'\}, for engine 0",
        page[0],
    )
    (tmp_path / "tool").touch()
    cluster.gather({called: "engine 0"})
    cluster.gather({engine.call("shutdown"): "engine 0"})
    cluster.end(engine)


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> tuple[list[Worker], list[int]]:
    """Two workers that wait for a file, and their process ids, which their heartbeats have told."""
    workers = [cluster.worker(f"engine {index}", index) for index in range(2)]
    started = {worker.start("hanging:Sleeper"): worker.name for worker in workers}
    pids = cluster.gather(started)
    while [cluster._pid_of(worker) for worker in workers] != pids:
        cluster.gather({worker.call("wait_for", Path(__file__)): worker.name for worker in workers})
        cluster._look()
    return workers, pids


Engines = tuple[list[Worker], list[int]]


def test_an_engine_whose_scheduler_a_signal_has_stopped_is_named_until_it_gives_that_up(
    watched: Watched, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real engine: it has a page at the deadline of the phase, and another one before its own end."""
    cluster = watched.cluster
    monkeypatch.setattr(cluster, "_before_hang", watched.watch.before_end)
    engine = cluster.worker("engine 7", 0, computes=True)
    (pid,) = cluster.gather({engine.start("hanging:RealEngine", checkpoint): engine.name})
    engine.watch("fail")
    (scheduler,) = [
        psutil.Process(process.pid)
        for process in processes_of({pid: engine.name})
        if process.title == SCHEDULER
    ]
    sampled = engine.call("sample")
    scheduler.suspend()
    stopped = (
        f"of engine 7 (pid {scheduler.pid}): a signal has stopped the process (SIGSTOP or Ctrl-Z)"
    )
    try:
        page = watched.page_of({sampled: engine.name}, "rollout")
        assert page[0].endswith(stopped)
        watched.lines.clear()
        with (
            watched.clock.phase(1, "rollout"),
            pytest.raises(
                WorkerFailed, match=r"engine 7: EngineStandstill: engine scheduler 0 .* was stopped"
            ),
        ):
            cluster.gather({sampled: engine.name})
    finally:
        cluster.end(engine)
    # the second phase may have a page at its own deadline as well
    pages = {file: file.read_text() for file in (watched.folder / "hangs").iterdir()}
    made = "this page was made because engine 7: EngineStandstill: "
    (last,) = [file for file, page in pages.items() if made in page]
    first = pages[last].splitlines()[0]
    assert first.endswith(stopped)
    assert f"HANG: {first}; the rest is in {last}" in watched.lines
    assert not scheduler.is_running()


def test_a_full_object_store_is_named(watched: Watched, engines: Engines, tmp_path: Path):
    kept = []
    for _ in range(STORE_BYTES // PART_BYTES):
        ref = watched.cluster.put(np.zeros(PART_BYTES - 2**12, np.uint8))
        # Ray moves to its disk what nobody reads
        kept.append((ref, ray.get(ref)))
    while max(hang_evidence._store_shares().values(), default=0.0) < FULL_SHARE:
        time.sleep(0.05)  # until Ray has counted them
    worker = engines[0][0]
    call = worker.call("wait_for", tmp_path / "end")
    page = watched.page_of({call: worker.name}, "train")
    (tmp_path / "end").touch()
    watched.cluster.gather({call: worker.name})
    assert re.match(r"the object store of node [\d.]+ is full \(\d+%\): ", page[0])
    assert kept


def test_a_phase_has_one_page_and_those_that_are_asked_for_or_come_before_an_end(
    watched: Watched, engines: Engines, tmp_path: Path
):
    worker = engines[0][0]
    calls = {worker.call("wait_for", tmp_path / "end"): worker.name}
    wanted = iter([True])
    with watched.clock.phase(1, "save"):
        for _ in range(REPORT_S):
            watched.cluster.await_any(calls, patience_s=1.0)
            if watched.lines:
                break
        watched.cluster.await_any(calls, patience_s=2 * LIMIT_S)
        watched.watch.before_end("rank 0 has not answered for 9 s")
        with patch.object(hang_watch, "take_report_request", lambda: next(wanted, False)):
            for _ in range(REPORT_S):
                watched.cluster.await_any(calls, patience_s=1.0)
                if len(pages := sorted((tmp_path / "hangs").iterdir())) > 2:
                    break
    (tmp_path / "end").touch()
    watched.cluster.gather(calls)
    assert [page.name for page in pages] == [
        "step_1_save-2.txt",
        "step_1_save-3.txt",
        "step_1_save.txt",
    ]
    reasons = [page.read_text().splitlines()[2].rpartition("because ")[2] for page in pages]
    assert reasons[:2] == ["rank 0 has not answered for 9 s", "SIGUSR2 asked for it"]
    assert reasons[2].startswith("phase save of step 1 has lasted for longer than ")


def test_a_page_is_written_before_a_silence_ends_the_run(
    watched: Watched, engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    cluster = watched.cluster
    workers, pids = engines
    monkeypatch.setattr(cluster, "_before_hang", watched.watch.before_end)
    monkeypatch.setattr(cluster, "_timeout_s", BOUND_S)
    calls = {worker.call("wait_for", Path("never")): worker.name for worker in workers}
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerFailed, match="has not answered"):
        cluster.gather(calls)
    (line,) = watched.lines
    assert line.startswith(f"HANG: engine 1 (pid {pids[1]}): a signal has stopped the process")
    for worker in workers:
        cluster.end(worker)


def test_a_disk_that_does_not_answer_is_named_on_a_page_elsewhere(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run's own folder is on it, and the page says in whose function the disk holds this process."""
    lines: list[str] = []
    clock = PhaseClock(0.0, 600.0)
    with stalling_disk(tmp_path / "disk") as disk:
        watch = HangWatch(clock, disk.path, lines.append, cluster._view, redacted)
        monkeypatch.setattr(cluster, "_before_hang", watch.before_end)
        monkeypatch.setattr(hang_watch, "_ELSEWHERE", str(tmp_path))
        file = disk.path / "weights"
        disk.stop()
        with pytest.raises(Silence) as raised, clock.phase(3, "save"):
            while_answering(lambda: file.write_bytes(b"1"), disk.path, "the checkpoint", 1.0)
        cluster._write_last_page(raised.value, None)
        cluster._write_last_page(raised.value, None)
        disk.go_on()
        while has_open_calls():
            time.sleep(0.01)
    hang, elsewhere = lines
    problem = f"the disk of {disk.path} has not answered for 1 s while the checkpoint was written"
    assert hang == f"HANG: {problem}; the rest is in {disk.path}/hangs/step_3_save.txt"
    (page,) = tmp_path.glob("megarl_hangs_*.txt")
    assert elsewhere == f"the disk of {disk.path}/hangs does not take the page, which is in {page}"
    first, _, where, *stacks = page.read_text().splitlines()
    assert first == problem and where.startswith("in phase save of step 3, ")
    assert any("write_bytes (pathlib" in line for line in stacks)
