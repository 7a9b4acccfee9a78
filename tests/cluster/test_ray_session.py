"""A real Ray session: what workers return, how their failures reach the caller, and what is left afterwards."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.cluster.actor import Ref, Worker, answers, at_arrival, ray_nodes
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.pulses import Pulses
from megarl.cluster.ray_session import Cluster
from megarl.cluster.stillness import GroupStillness
from megarl.config import PlacementConfig
from megarl.config.timeline import TimelineConfig
from megarl.fleet.step_timeline import StepTimeline, clock_of
from megarl.timeline import recorder
from megarl.training import profiling
from megarl.types import FaultMember, ProcessLost, SilentFault, UserError
from megarl.types.remote import RemoteCall
from tests.leftovers import left_since, shared_files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TARGET = "test_ray_session:Target"
PYTHONPATH = f"{ROOT}:{ROOT / 'tests' / 'cluster'}"
AHEAD_NS = 86_400 * 10**9
DRIFT = 1000  # one part in so many, more than any quartz has
BOUND_S = 5.0  # of a silence; the machine may be busy


def doubled(first: str, *rest: int) -> tuple[str | int, ...]:
    return first, *(2 * number for number in rest)


@dataclass(frozen=True)
class Joining(RemoteCall):
    name: str
    doubled: tuple[str | int, ...]
    parts: list[int]


def _words_of_a_thread_without_memory() -> str:
    """What CPython says in a process that gets no more memory."""
    program = """
import resource, threading
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used, used))
try:
    while True:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
except RuntimeError as error:
    print(error, flush=True)
"""
    return subprocess.check_output([sys.executable, "-c", program], text=True).strip()


class Target:
    """Runs in the workers; found there by this module's name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self) -> None:
        with profiling.profiled():
            pass

    def has_profile(self) -> bool:
        return profiling._profile is not None

    def add(self, number: int) -> int:
        return self.rank + number

    def have_another_clock(self) -> None:
        """As a process of another node, whose clock is of another day and runs fast."""
        recorder._clock = lambda: "another"
        began_ns = time.monotonic_ns()

        def monotonic_ns() -> int:
            passed_ns = time.monotonic_ns() - began_ns
            return began_ns + AHEAD_NS + passed_ns + passed_ns // DRIFT

        recorder.time = SimpleNamespace(monotonic_ns=monotonic_ns)

    async def pair(self) -> tuple[int, bytes]:
        return self.rank, bytes(1000)

    def size(self, payload: bytes) -> int:
        return len(payload)

    def join(self, call: Joining) -> str:
        doubled = "".join(map(str, call.doubled))
        return f"{call.name} {doubled} {''.join(map(str, call.parts))}"

    def error(self) -> None:
        raise UserError("reward.function", "returned nan", "return a finite number")

    def find_fault(self) -> None:
        raise SilentFault("replicas", "differed", [FaultMember(3)])

    def hang_or_raise(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("first line\nthe cause")
        self.hang()

    def raise_much(self) -> None:
        raise ValueError("the beginning" + "x" * 3_000_000 + "the end")

    def be_lost(self) -> None:
        raise ProcessLost("the beginning" + "x" * 3_000_000 + "the end")

    def be_lost_by_much(self) -> None:
        try:
            self.raise_much()
        except ValueError as error:
            raise ProcessLost("the end") from error

    def fail_without_thread(self) -> None:
        raise RuntimeError(_words_of_a_thread_without_memory())

    def fail_without_memory(self) -> None:
        """A tensor for which the process gets no memory."""
        import torch

        torch.ones(1)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, limits[1]))
        try:
            torch.empty(2**33, dtype=torch.uint8)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    def hang(self) -> None:
        time.sleep(600)

    def spawn(self) -> int:
        """A child process that outlives nobody's patience; its id."""
        return subprocess.Popen(["sleep", "600"]).pid

    def wait_for(self, file: Path) -> int:
        while not file.exists():
            time.sleep(0.01)
        return self.rank

    def work(self, seconds: float) -> int:
        """As long a call as a rollout is, to the bound of a test."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        return self.rank

    def fail_when_stopped(self, pid: int) -> None:
        """What a collective does whose peer stands still."""
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        raise RuntimeError("Timed out waiting 20000ms for recv operation to complete")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with Cluster(2) as session:
            yield session


def started(cluster: Cluster, name: str) -> tuple[list[Worker], list[int]]:
    """Two workers with a target each, and their process ids."""
    named_workers = [cluster.worker(f"{name} {rank}", rank) for rank in range(2)]
    calls = {worker.start(TARGET, rank): worker.name for rank, worker in enumerate(named_workers)}
    return named_workers, cluster.gather(calls)


def ask(cluster: Cluster, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
    return cluster.gather({worker.call(method, *args): worker.name for worker in workers})


@pytest.fixture(scope="module")
def workers(cluster: Cluster) -> list[Worker]:
    return started(cluster, "rank")[0]


def test_results_come_back_in_order(cluster: Cluster, workers: list[Worker]):
    assert ask(cluster, workers, "add", 10) == [10, 11]


def test_calls_are_heard_of_as_they_return(cluster: Cluster, workers: list[Worker]):
    slow, fast = workers[0].call("work", 0.5), workers[1].call("add", 1)
    calls = {slow: "rank 0", fast: "rank 1"}
    assert cluster.await_any(calls) == [fast]
    assert cluster.await_any({slow: "rank 0"}) == [slow]
    failing = workers[1].call("error")
    with pytest.raises(UserError, match="returned nan"):
        while cluster.await_any({workers[0].call("add", 1): "rank 0", failing: "rank 1"}):
            pass


class Counting:
    """Background work of one call after another, until `last` were taken; each takes its call's result by a call."""

    def __init__(self, cluster: Cluster, worker: Worker, last: Path) -> None:
        self.cluster, self.worker, self.last, self.taken = cluster, worker, last, []
        self.calls = {worker.call("add", 0): worker.name}

    def labels(self) -> dict[Ref, str]:
        return dict(self.calls)

    def take(self, ended: Sequence[Ref]) -> None:
        assert [*self.calls] == [*ended]
        self.taken += self.cluster.gather(self.labels())
        count = len(self.taken)
        self.calls = {self.worker.call("add", count): self.worker.name} if count < 3 else {}
        if not self.calls:
            self.last.touch()


def test_background_work_goes_on_while_others_are_waited_for(
    cluster: Cluster, workers: list[Worker], tmp_path: Path
):
    """The call that is waited for ends when the background work has taken its third result."""
    counting = Counting(cluster, workers[1], tmp_path / "last")
    cluster.begin_background(counting)
    assert ask(cluster, workers[:1], "wait_for", tmp_path / "last") == [0]
    assert counting.taken == [1, 2, 3]
    cluster.end_background(counting)


def test_a_failure_in_the_background_ends_what_is_waited_for(
    cluster: Cluster, workers: list[Worker], tmp_path: Path
):
    counting = Counting(cluster, workers[1], tmp_path / "last")
    counting.calls = {workers[1].call("error"): "rank 1"}
    cluster.begin_background(counting)
    waited_for = workers[0].call("wait_for", tmp_path / "last")
    with pytest.raises(UserError, match="returned nan"):
        cluster.gather({waited_for: "rank 0"})
    (tmp_path / "last").touch()
    assert cluster.gather({waited_for: "rank 0"}, among=workers) == [0], (
        "what a rescue needs goes on without it"
    )
    cluster.end_background(counting)


def test_half_a_pair_stays_in_the_object_store(cluster: Cluster, workers: list[Worker]):
    light, heavy = workers[1].call_many(2, "pair")
    assert cluster.gather({light: "rank 1"}) == [1]
    assert ask(cluster, workers[:1], "size", heavy) == [1000]
    (light,) = workers[1].call_many(1, "pair")
    assert cluster.gather({light: "rank 1"}) == [1], "not the pair"


def test_what_a_worker_computes_arrives_in_the_calls_of_others(
    cluster: Cluster, workers: list[Worker]
):
    parts = [cluster.put(number) for number in range(1, 4)]
    doubled = workers[1].compute("test_ray_session:doubled", "a", *parts)
    calls = {}
    for worker in workers:
        call = Joining(worker.name, at_arrival(doubled), [at_arrival(part) for part in parts])
        calls[worker.call("join", call)] = worker.name
    assert cluster.gather(calls) == ["rank 0 a246 123", "rank 1 a246 123"]


def test_what_could_not_be_computed_fails_the_calls_with_it(
    cluster: Cluster, workers: list[Worker]
):
    doubled = workers[1].compute("test_ray_session:doubled", "a", None)
    with pytest.raises(WorkerFailed, match=r"^rank 0: TypeError: unsupported operand"):
        ask(cluster, workers[:1], "join", Joining("", at_arrival(doubled), []))


def test_those_who_are_alive_can_end_what_they_began(cluster: Cluster, workers: list[Worker]):
    dead = cluster.worker("dead", 0)
    dead.kill()
    with pytest.raises(WorkerFailed, match="dead: its process died"):
        while True:  # until Ray has noticed it
            ask(cluster, workers[:1], "add", 10)
    assert cluster.gather({workers[0].call("add", 10): "rank 0"}, among=workers) == [10]
    cluster._workers.remove(dead)


def test_who_asks_for_answers_gets_those_there_are(cluster: Cluster, workers: list[Worker]):
    stuck = cluster.worker("stuck", 0)
    cluster.gather({stuck.start(TARGET, 2): "stuck"})
    calls = {
        workers[0].call("add", 10): "sound",
        workers[1].call("error"): "faulty",
        stuck.call("hang"): "stuck",
    }
    answers_by_name = answers(calls, BOUND_S)
    assert answers_by_name["sound"] == 10
    assert (
        isinstance(answers_by_name["faulty"], UserError)
        and answers_by_name["faulty"].where == "reward.function"
    )
    assert isinstance(answers_by_name["stuck"], TimeoutError)
    stuck.kill()
    cluster._workers.remove(stuck)
    assert isinstance(answers({stuck.call("add", 1): "dead"}, BOUND_S)["dead"], Exception)


def test_every_node_gets_a_worker_that_takes_no_gpu(cluster: Cluster, workers: list[Worker]):
    (node,) = ray_nodes(cluster.host)
    assert node.gpus == 2
    started = answers({node.worker.start(TARGET, 5): "node"}, 120.0)
    assert isinstance(started["node"], int), started
    assert answers({node.worker.call("add", 1): "node"}, BOUND_S) == {"node": 6}
    node.worker.kill()


def spans_of(file: Path) -> list[tuple[str, str]]:
    """(process, name) of each span of a timeline, the clock's error left out, in the order of their begins."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    return [(names[span["pid"]].partition(" (")[0], span["name"]) for span in spans]


def test_a_timeline_has_what_all_processes_did_in_the_chosen_steps(
    cluster: Cluster, workers: list[Worker], tmp_path: Path
):
    said: list[str] = []
    timeline = StepTimeline(cluster, TimelineConfig(steps=(2, 3)), tmp_path, said.append)
    with timeline.recording(1):
        ask(cluster, workers, "add", 1)
    assert not list(tmp_path.iterdir())
    with timeline.recording(2):
        ask(cluster, workers, "add", 1)
        ask(cluster, workers, "pair")  # on the event loop: no span of the thread
        late = cluster.worker("late", 0)
        cluster.gather({late.start(TARGET, 2): "late"})
    assert sorted(spans_of(tmp_path / "timeline" / "step_2.json.gz")) == [
        ("controller", "step 2"),
        ("rank 0", "add"),
        ("rank 1", "add"),
    ]
    assert said.pop().endswith("; without late, which did not record the whole step")
    cluster.end(late)

    with pytest.raises(KeyError), timeline.recording(3):  # and is repeated, as after a failure
        ask(cluster, workers, "add", 1)
        raise KeyError
    with timeline.recording(3):
        ask(cluster, workers, "size", b"")
    assert spans_of(tmp_path / "timeline" / "step_3.json.gz")[0] == ("controller", "step 3")
    assert {name for _, name in spans_of(tmp_path / "timeline" / "step_3.json.gz")[1:]} == {"size"}
    answer = {worker.compute("megarl.timeline.recorder:is_recording"): "" for worker in workers}
    assert cluster.gather(answer) == [False, False] and not recorder.is_recording()


def test_heartbeats_go_on_beside_work_of_the_controller(cluster: Cluster, workers: list[Worker]):
    done: list[float] = []
    cluster._pulses._looked_at = 0.0  # they are due

    def work() -> None:
        time.sleep(2.5)
        done.append(cluster._pulses._looked_at)

    cluster.run_beside(work)
    assert done[0] > 0.0
    with pytest.raises(KeyError):
        cluster.run_beside(lambda: {}["a"])


def test_a_profile_ends_with_its_step_and_is_missed_where_there_is_none(
    cluster: Cluster, workers: list[Worker], tmp_path: Path
):
    said: list[str] = []
    config = TimelineConfig(steps=(1, 2), profile_ranks=(0, 1))
    timeline = StepTimeline(cluster, config, tmp_path, said.append, lambda: workers)
    with pytest.raises(KeyError), timeline.recording(1):
        ask(cluster, workers, "train")
        assert ask(cluster, workers, "has_profile") == [True, True]
        raise KeyError
    # nobody waits for ranks that free their profiles, as they may hang
    deadline = time.monotonic() + 60
    while any(ask(cluster, workers, "has_profile")):
        assert time.monotonic() < deadline
    with timeline.recording(2):
        ask(cluster, workers[:1], "train")
    file = tmp_path / "timeline" / "step_2.rank_0.json.gz"
    assert said[1:] == [
        f"the profile of rank 0 is in {file}",
        "rank 1 has no profile: it was started within the step, or did not train in it",
    ]
    assert file.exists()


def test_the_clock_of_another_process_is_read_to_within_the_stated_error(
    cluster: Cluster, tmp_path: Path
):
    """All processes of this machine have one, so that the truth is 0; then one of them has another, which drifts."""
    (other,) = [cluster.worker("other", 1)]
    cluster.gather({other.start(TARGET, 1): "other"})
    offset = clock_of(other)
    assert offset is not None
    assert offset.error_ns > 0 and abs(offset.offset_ns) <= offset.error_ns

    ask(cluster, [other], "have_another_clock")
    offset = clock_of(other)
    assert offset is not None and abs(offset.offset_ns + AHEAD_NS) < AHEAD_NS // 1000
    said: list[str] = []
    timeline = StepTimeline(cluster, TimelineConfig(steps=(1,)), tmp_path, said.append)
    with timeline.recording(1):
        ask(cluster, [other], "work", 0.1)
    content = json.loads(gzip.decompress((tmp_path / "timeline" / "step_1.json.gz").read_bytes()))
    error_us = content["otherData"]["clock_error_us"]["other"]
    assert 0 < error_us < 1e6
    assert f"the clocks of 2 nodes are aligned to within {error_us:.0f} us" in said[0]
    (step,) = [event for event in content["traceEvents"] if event["name"] == "step 1"]
    (work,) = [event for event in content["traceEvents"] if event["name"] == "work"]
    assert step["ts"] - error_us <= work["ts"]
    assert work["ts"] + work["dur"] <= step["ts"] + step["dur"] + error_us
    cluster.end(other)


def test_a_user_error_arrives_as_itself(cluster: Cluster, workers: list[Worker]):
    with pytest.raises(UserError) as caught:
        ask(cluster, workers[:1], "error")
    assert (caught.value.where, caught.value.hint) == ("reward.function", "return a finite number")


def test_a_silent_fault_arrives_as_itself(cluster: Cluster, workers: list[Worker]):
    """It is no worker's failure: the ranks that raise it tell of another."""
    with pytest.raises(SilentFault) as caught:
        ask(cluster, workers, "find_fault")
    assert caught.value.members == (FaultMember(3),)


def test_a_library_that_cannot_be_loaded_is_the_installations_fault(cluster: Cluster):
    """What `import torch` raises where CUDA's libraries are another release's."""
    (node,) = ray_nodes(cluster.host)
    (error,) = answers({node.worker.start("cannot_load:Target", 0): "node"}, 120.0).values()
    node.worker.kill()
    assert isinstance(error, UserError)
    assert str(error).startswith(
        "cannot_load: it cannot be imported on node "
    ) and "libnone.so.1: cannot" in str(error)


def test_an_exception_names_the_worker_and_its_cause_while_others_hang(cluster: Cluster):
    pair, _ = started(cluster, "stuck")
    with pytest.raises(WorkerFailed, match=r"^stuck 1: ValueError: the cause$") as caught:
        ask(cluster, pair, "hang_or_raise", 1)
    assert "in hang_or_raise" in caught.value.evidence, "the worker's own traceback"


def notice_silence_soon(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_timeout_s", BOUND_S)
    monkeypatch.setattr(cluster, "_pulses", Pulses(BOUND_S))


@pytest.fixture
def stuck(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Worker], int]]:
    """Two workers more, whose silence is noticed soon, and the process id of the second."""
    pair, (_, pid) = started(cluster, "peer")
    notice_silence_soon(cluster, monkeypatch)
    # pulses came meanwhile
    ask(cluster, pair, "work", BOUND_S / 2)
    yield pair, pid
    os.kill(pid, signal.SIGKILL)
    for worker in pair:
        cluster._workers.remove(worker)
        worker.kill()


def test_a_stopped_process_is_named_whoever_is_waited_for(
    cluster: Cluster, stuck: tuple[list[Worker], int]
):
    (first, _), pid = stuck
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        WorkerFailed,
        match=rf"^peer 1 \(pid {pid}\) has not answered for \d+ s: a signal stopped it$",
    ):
        ask(cluster, [first], "hang")
    assert time.monotonic() - began < 5 * BOUND_S
    assert not cluster.settle({first.call("hang"): first.name}), "it would never end"


def test_a_stopped_process_is_named_before_the_peers_who_gave_up_on_it(
    cluster: Cluster, stuck: tuple[list[Worker], int], monkeypatch: pytest.MonkeyPatch
):
    (first, second), pid = stuck
    # a peer may have waited for long when its partner is stopped
    monkeypatch.setattr(cluster, "_timeout_s", 600.0)
    calls = {first.call("fail_when_stopped", pid): first.name, second.call("hang"): second.name}
    os.kill(pid, signal.SIGSTOP)
    named = rf"^peer 1 \(pid {pid}\) has not answered for .*: a signal stopped it$"
    with pytest.raises(WorkerFailed, match=named) as caught:
        cluster.gather(calls)
    assert "Timed out waiting 20000ms" in caught.value.evidence


def test_a_call_may_take_longer_than_a_silence(
    cluster: Cluster, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
):
    notice_silence_soon(cluster, monkeypatch)
    assert ask(cluster, workers, "work", 2 * BOUND_S) == [0, 1]


def test_a_large_error_is_cut_and_heard(cluster: Cluster, workers: list[Worker]):
    """Ray would keep it on the node where it was raised."""
    with pytest.raises(WorkerFailed, match="the end") as caught:
        ask(cluster, workers[:1], "raise_much")
    assert (
        "ValueError: the beginning" in caught.value.evidence and len(caught.value.evidence) < 50_000
    )


@pytest.mark.parametrize("method", ["be_lost", "be_lost_by_much"])
def test_a_large_error_still_tells_that_a_process_is_lost(
    cluster: Cluster, workers: list[Worker], method: str
):
    """Also the text of the error from which it comes is left out where that is large."""
    (lost,) = cluster.outcomes({workers[0].call(method): workers[0].name})
    assert isinstance(lost, WorkerFailed) and str(lost).endswith("the end")
    assert len(lost.evidence) < 50_000


@pytest.mark.parametrize("method", ["fail_without_thread", "fail_without_memory"])
def test_a_process_that_gets_no_more_memory_is_lost(
    cluster: Cluster, workers: list[Worker], method: str
):
    (lost,) = cluster.outcomes({workers[0].call(method): workers[0].name})
    assert isinstance(lost, WorkerFailed)
    assert str(lost) == f"{workers[0].name}: out of memory (RuntimeError)"
    assert lost.memory and lost.memory.bytes_by_name["resident set"] > 2**20
    cause = "can't start new thread" if method == "fail_without_thread" else "8589934592 bytes"
    assert cause in str(lost.memory)


def test_every_worker_says_where_it_sits(cluster: Cluster, workers: list[Worker]):
    placements = cluster.placements(workers, PlacementConfig(gpus=2))
    assert [placement.address for placement in placements] == cluster.nodes * 2
    (node,) = cluster._slots.in_use
    cluster._slots.in_use[0] = replace(node, address="127.0.0.9")
    with pytest.raises(
        RuntimeError, match=rf"rank 0 of GPU slot 0 is on {node.address}, not on 127\.0\.0\.9"
    ):
        cluster.placements(workers, PlacementConfig(gpus=2))
    cluster._slots.in_use[0] = node


def test_calls_settle_when_each_has_ended_well_or_not(cluster: Cluster, workers: list[Worker]):
    calls = {workers[0].call("error"): "rank 0", workers[1].call("add", 1): "rank 1"}
    assert cluster.settle(calls)
    assert cluster.gather({ref: name for ref, name in calls.items() if name == "rank 1"}) == [2]


@pytest.fixture
def replaceable(cluster: Cluster) -> Iterator[tuple[Worker, int, list[Exception]]]:
    """A worker whose loss does not end the run, its process id, and the causes that its owner is told."""
    causes: list[Exception] = []
    worker = cluster.worker("engine 0", 0, causes.append)
    (pid,) = cluster.gather({worker.start(TARGET, 7): worker.name})
    yield worker, pid, causes
    cluster.end(worker)


def test_the_owner_of_a_replaceable_worker_is_told_of_its_death_while_others_are_waited_for(
    cluster: Cluster,
    workers: list[Worker],
    replaceable: tuple[Worker, int, list[Exception]],
    tmp_path: Path,
):
    worker, pid, causes = replaceable
    pending = worker.call("hang")
    waited_for = workers[0].call("wait_for", tmp_path / "told")
    os.kill(pid, signal.SIGKILL)
    while not causes:
        cluster.gather({workers[1].call("add", 1): "rank 1"})
    assert [str(cause) for cause in causes] == ["engine 0: its process died"]
    (tmp_path / "told").touch()
    assert cluster.gather({waited_for: "rank 0"}) == [0]
    (lost,) = cluster.outcomes({pending: worker.name})
    assert str(lost) == "engine 0: its process died"
    with pytest.raises(WorkerFailed, match="its process died") as caught:
        cluster.gather({pending: worker.name})
    assert caught.value.worker == "engine 0", "who must have an answer does not get one"
    assert len(causes) == 1


def test_calls_of_a_replaceable_worker_settle_when_it_dies(
    cluster: Cluster, workers: list[Worker], replaceable: tuple[Worker, int, list[Exception]]
):
    worker, pid, causes = replaceable
    calls = {worker.call("hang"): worker.name, workers[1].call("add", 1): "rank 1"}
    os.kill(pid, signal.SIGKILL)
    assert cluster.settle(calls)
    assert len(causes) == 1


def test_whoever_takes_the_place_of_a_lost_worker_is_not_lost_by_its_calls(
    cluster: Cluster, replaceable: tuple[Worker, int, list[Exception]]
):
    worker, pid, causes = replaceable
    calls = {worker.call("hang"): worker.name}
    os.kill(pid, signal.SIGKILL)
    while not causes:
        cluster.settle(calls)
    others: list[Exception] = []
    another = cluster.worker(worker.name, 0, others.append)
    cluster.gather({another.start(TARGET, 7): another.name})
    assert cluster.settle(calls)
    assert (len(causes), others) == (1, [])
    cluster.end(another)


def test_a_replaceable_worker_that_raises_something_else_ends_the_wait(
    cluster: Cluster, replaceable: tuple[Worker, int, list[Exception]]
):
    worker, _, causes = replaceable
    with pytest.raises(UserError, match="returned nan"):
        cluster.outcomes({worker.call("error"): worker.name})
    assert causes == []


def test_a_stopped_worker_is_given_up_soon_and_killed_with_its_children(
    cluster: Cluster,
    workers: list[Worker],
    replaceable: tuple[Worker, int, list[Exception]],
    monkeypatch: pytest.MonkeyPatch,
):
    worker, pid, causes = replaceable
    monkeypatch.setattr(cluster, "_quick_pulses", Pulses(BOUND_S))
    child = cluster.gather({worker.call("spawn"): worker.name})[0]
    ask(cluster, workers, "work", BOUND_S / 2)  # pulses came meanwhile
    os.kill(pid, signal.SIGSTOP)
    while not causes:
        cluster.gather({workers[1].call("work", BOUND_S / 2): "rank 1"})
    assert re.fullmatch(
        rf"engine 0 \(pid {pid}\) has not answered for \d+ s: a signal stopped it", str(causes[0])
    )
    cluster.end(worker)
    assert not psutil.pid_exists(pid)
    assert not psutil.pid_exists(child)


def test_workers_that_compute_and_stand_still_are_given_up_and_no_others(
    cluster: Cluster, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
):
    """They answer heartbeats all the same; one that works is the progress of those that wait for it."""
    monkeypatch.setattr(cluster, "_stillness", GroupStillness(BOUND_S))
    causes: list[Exception] = []
    pair: list[Worker] = []

    def on_loss(cause: Exception) -> None:
        causes.append(cause)
        cluster.end_all(pair)

    pair += [cluster.worker(f"peer {rank}", rank, on_loss, computes=True) for rank in range(2)]
    cluster.gather({worker.start(TARGET, 0): worker.name for worker in pair})
    stuck = pair[0].call("hang")
    working = pair[1].call("work", 2 * BOUND_S)
    assert cluster.await_any({stuck: "peer 0", working: "peer 1"}) == [working]
    assert causes == []
    (lost,) = cluster.outcomes({stuck: "peer 0"})
    assert str(lost) == "peer 0: its process died"
    assert re.fullmatch(
        r"peer 0 \(pid \d+\) stands still: it has used no processor and moved no bytes for \d+ s",
        str(causes[0]),
    )


def _program(program: str, argument: str, marker: Path) -> subprocess.CompletedProcess[str]:
    """A session in another process. marker: by which what it leaves behind is known."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "MEGARL_TEST": str(marker)}
    command = [sys.executable, "-c", program, argument]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


_DIES = """
import os, signal, sys
from megarl.cluster.processes import raise_on_sigterm
raise_on_sigterm()
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
with Cluster(2) as cluster:
    workers = [cluster.worker(f"rank {rank}", rank) for rank in range(2)]
    pids = cluster.gather({w.start("test_ray_session:Target", rank): w.name for rank, w in enumerate(workers)})
    if sys.argv[1] != "kill":
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    os.kill(pids[0], signal.SIGKILL)
    try:
        # Only the other worker is being waited for: a death is noticed whatever is in flight.
        cluster.gather({workers[1].call("hang"): "rank 1"})
    except WorkerFailed as failure:
        print(cluster.settle({workers[1].call("hang"): "rank 1"}))  # it would never end
        print(failure)
"""


# By day tests/end_to_end/test_ending.py sends the command both signals.
@pytest.mark.parametrize(
    ("how", "last_line"),
    [
        ("kill", "rank 0: its process died"),
        pytest.param("SIGINT", "", marks=pytest.mark.nightly),
        pytest.param("SIGTERM", "", marks=pytest.mark.nightly),
    ],
)
def test_a_death_or_an_interrupt_ends_the_session_and_leaves_nothing(
    how: str, last_line: str, tmp_path: Path
):
    files_before = shared_files()
    done = _program(_DIES, how, tmp_path)
    # which tells of deaths too
    lines = [line for line in done.stdout.splitlines() if "raylet" not in line]
    assert lines[-2:] == (["False", last_line] if last_line else [])
    assert (done.returncode == 0) == (how == "kill"), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (how != "kill"), done.stderr
    assert left_since(files_before) == []
    assert _left(tmp_path) == []


# Objects in Ray's store keep Ray from a graceful end: it ends the process that owns them.
_ONE_SESSION = """
import os, signal, sys
from pathlib import Path
import psutil
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.cluster.supervisor import supervised
from megarl.diagnosis.phases import PhaseClock

def run():
    session = Cluster(1, say=print)
    session.watch_phases(PhaseClock(0.0, 600.0), Path(os.environ["MEGARL_TEST"]), str)
    with session as cluster:
        worker = cluster.worker("rank 0", 0, lambda _: print("it is started anew"))
        cluster.gather({worker.start("test_ray_session:Target", 0): worker.name})
        print("folder", cluster._folder.path, flush=True)
        kept = [cluster.put(bytes(2**20)) for _ in range(8)] if sys.argv[1] == "RuntimeEnvAgent" else []
        above = psutil.Process().parent()
        below = psutil.Process().children(recursive=True)
        os.kill(next(p.pid for p in [above, *below] if sys.argv[1] in p.name()), signal.SIGKILL)
        cluster.gather({worker.call("hang"): worker.name})

def outcome():
    try:
        run()
    except WorkerFailed as failure:
        print(failure)
    return 1

sys.exit(supervised(outcome, print))
"""


def _folder(done: subprocess.CompletedProcess[str]) -> Path:
    """Of the session; Ray's own lines come between ours."""
    return next(
        Path(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("folder ")
    )


def _left(marker: Path) -> list[str]:
    """The command lines of what a session left behind."""
    left = []
    for process in psutil.process_iter(["environ", "cmdline", "status"]):
        is_ours = (process.info["environ"] or {}).get("MEGARL_TEST") == str(marker)
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            left.append(" ".join(process.info["cmdline"] or []))
    return left


@pytest.mark.parametrize(
    "servers",
    [
        ["raylet", "RuntimeEnvAgent"],
        pytest.param(["gcs_server", "DashboardAgent"], marks=pytest.mark.nightly),
    ],
)
def test_the_death_of_a_server_of_rays_is_named_and_the_folder_of_a_killed_session_goes_with_the_next(
    tmp_path: Path, servers: list[str]
):
    """A raylet ends when one of its agents is gone, and takes its workers with it: none is lost by itself.

    Killed is a supervisor, with which the command below it ends.
    """
    killed = _folder(_program(_ONE_SESSION, "python", tmp_path / "0"))
    assert killed.is_dir() and killed.stat().st_mode & 0o777 == 0o700
    assert (killed / "ray").is_dir(), "Ray opens its folder to everyone: it must lie inside"
    for server in servers:
        folder = tmp_path / server
        folder.mkdir()
        done = _program(_ONE_SESSION, server, folder)
        is_agent = server.endswith("Agent")
        how = "has ended, and with it its raylet" if is_agent else "was killed by SIGKILL"
        ended = rf"(megarl: )?Ray's {server} \(pid \d+\) {how}; start the command again.*"
        assert re.fullmatch(ended, done.stdout.splitlines()[-1]), done
        # by the command, where Ray lets it live for so long, or by its supervisor
        (page,) = (folder / "hangs").iterdir()
        cause = done.stdout.splitlines()[-1].removeprefix("megarl: ")
        assert page.read_text().splitlines()[0] == cause
        assert "it is started anew" not in done.stdout
        assert done.returncode == 1
        assert not _folder(done).exists()
        assert _left(folder) == []
    assert not killed.exists()


_CLIENT = """
import ray, sys
ray.init(address=sys.argv[1], logging_level="error")
print("connected as a client")
"""


def test_a_client_without_the_token_or_with_a_wrong_one_is_refused(cluster: Cluster):
    import ray

    address = ray.get_runtime_context().gcs_address
    tokens = {
        "none": {"RAY_AUTH_MODE": "disabled"},
        "wrong": {"RAY_AUTH_TOKEN": "0" * 64},
        "right": {},
    }
    bare = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_TOKEN"}
    clients = {
        name: subprocess.Popen(
            [sys.executable, "-c", _CLIENT, address],
            env=(os.environ if name == "right" else bare) | change,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, change in tokens.items()
    }
    outputs_by_name = {name: client.communicate(timeout=90)[0] for name, client in clients.items()}
    assert "connected as a client" in outputs_by_name["right"]
    for name in ("none", "wrong"):
        assert "connected as a client" not in outputs_by_name[name]
        assert "uthenticat" in outputs_by_name[name], outputs_by_name[name]


def test_the_caller_cannot_switch_authentication_off():
    script = (
        "import os; from megarl.cluster.ray_environment import use_own_token; use_own_token();"
        "print(os.environ['RAY_AUTH_MODE'], os.environ['RAY_AUTH_TOKEN'], os.environ.get('RAY_AUTH_TOKEN_PATH'))"
    )
    weak = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "known",
        "RAY_AUTH_TOKEN_PATH": "/dev/null",
        # of a cluster of others, which a run of its own does not join
        "RAY_ADDRESS": "10.0.0.1:6379",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=weak, capture_output=True, text=True, check=True
    )
    mode, token, path = done.stdout.split()
    assert (mode, len(token), path) == ("token", 64, "None")
