"""What becomes of servers that are lost, and when none is left; processes, Ray and the servers are stood in for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.recovery import engine_processes
from megarl.recovery.engine_processes import EngineProcess
from megarl.recovery.external_engines import ExternalEngineProcesses
from megarl.rollout.load_balancing import Capacity
from megarl.types import ProcessLost
from megarl.types.losses import Losses
from tests.plan import plans


class Call:
    """A call to a worker; error: what it has raised. arguments: of the worker's constructor."""

    def __init__(self, worker: str, method: str, *arguments: Any) -> None:
        self.worker = worker
        self.method = method
        self.arguments = arguments
        self.error: Exception | None = None


class Worker:
    def __init__(self, name: str, gpus: float) -> None:
        self.name = name
        self.gpus = gpus

    def start(self, target: str, *arguments: object) -> Call:
        assert target == "megarl.rollout.worker:RolloutWorker"
        return Call(self.name, "start", *arguments)

    def call(self, method: str, *_: object) -> Call:
        return Call(self.name, method)

    def watch(self, method: str) -> None: ...


class Cluster:
    """`await_any` lets all calls end; those of `silent` servers are given up once there are no others.

    refusing: servers that cannot load weights.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.silent: set[str] = set()
        self.refusing: set[str] = set()
        self.loss_log = Losses()

    def worker(self, name: str, slot: int, on_loss: object, gpus: float) -> Worker:
        self.workers.append(Worker(name, gpus))
        return self.workers[-1]

    def replace_dead_nodes(self) -> None: ...

    def end(self, worker: Worker) -> None: ...

    def gather(self, calls: dict[Call, str]) -> list[Capacity]:
        return [Capacity(4, 100)] * len(calls)

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Capacity]:
        return [Capacity(4, 100)] * len(workers)

    def await_any(self, calls: dict[Call, str], *, may_lose: bool) -> list[Call]:
        waiting = [call for call in calls if call.worker in self.silent]
        ended = [call for call in calls if call not in waiting]
        if not ended:
            ended = waiting
        for call in waiting if ended is waiting else []:
            call.error = ProcessLost("nothing within 600 s")
        for call in ended:
            if call.method == "take_files" and call.worker in self.refusing:
                call.error = RuntimeError("no such folder")
        return ended


class Run:
    """Two servers with the weights of the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **keys: Any) -> None:
        def failure(call: Call) -> Exception | None:
            return call.error

        monkeypatch.setattr(engine_processes, "failure", failure)
        self.lines: list[str] = []
        self.cluster: Any = Cluster()
        engine = {"external": ["a:1", "b:2"]}
        recipe = plans.recipe(tmp_path, "tiny", 4, engine=engine, run=keys)
        self.processes = ExternalEngineProcesses(self.cluster, recipe, self.lines.append)
        self.processes.weights = self
        self.names = [engine.worker.name for engine in self.processes.engines]
        self.filled: list[int] = []
        assert len(self.processes.start()) == 2
        self.processes.started()
        self.processes.fill()

    def begin_copy(self, target: EngineProcess, sources: Sequence[EngineProcess]) -> Any:
        assert not sources, "weights come from files"
        self.filled.append(target.index)
        return {Call(target.worker.name, "take_files"): target.worker.name}

    def abandon_copies(self, engine: EngineProcess, reason: str) -> None: ...

    def publish_again(self) -> None:
        raise AssertionError("files are there already")

    @property
    def states(self) -> list[str]:
        return [engine.state for engine in self.processes.engines]

    def lose(self, index: int) -> None:
        engine = self.processes.engines[index]
        self.processes.lose(engine, engine.worker, WorkerFailed(f"loss {index}", "traceback"))

    def wait_s(self, index: int) -> float:
        """How long the server is left alone before it is asked."""
        calls: Any = self.processes.engines[index].calls
        (call,) = calls
        return call.arguments[-1]

    def go_on(self) -> None:
        calls: Any = self.processes.labels()
        self.processes.take(self.cluster.await_any(calls, may_lose=True))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path)


def test_the_processes_of_servers_use_no_gpu_and_share_none(run: Run) -> None:
    assert run.names == ["engine 0 at a:1", "engine 1 at b:2"]
    assert [worker.gpus for worker in run.cluster.workers] == [0, 0]
    assert [engine.slot for engine in run.processes.engines] == [0, 2]
    assert not any(engine.shares for engine in run.processes.engines)


def test_a_server_that_is_lost_is_asked_again_and_filled_while_the_other_serves(run: Run) -> None:
    run.filled.clear()
    run.lose(0)
    assert run.states == ["starting", "ready"]
    assert run.lines == ["loss 0; the server is asked again"]
    run.go_on()  # it answers
    run.go_on()  # its capacity is known
    assert run.states == ["filling", "ready"] and run.filled == [0]
    run.go_on()
    assert run.states == ["ready", "ready"]


def test_a_server_that_is_lost_again_and_again_is_left_alone_for_longer(run: Run) -> None:
    waits = []
    for _ in range(9):
        run.lose(0)
        waits.append(run.wait_s(0))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert run.states[1] == "ready"


def test_a_publication_waits_for_no_server_that_is_silent(run: Run) -> None:
    run.cluster.silent.add(run.names[0])
    run.lose(0)
    run.filled.clear()
    run.processes.restore()
    run.processes.fill()
    assert run.states == ["starting", "ready"] and run.filled == [1]
    run.cluster.silent.clear()
    for _ in range(3):
        run.go_on()
    assert run.states == ["ready", "ready"] and run.filled == [1, 0]


def test_a_server_that_is_being_filled_gets_the_next_weights_after_these(run: Run) -> None:
    run.lose(0)
    run.go_on()
    run.go_on()
    assert run.states[0] == "filling"
    run.processes.restore()
    assert run.states == ["ready", "ready"]
    run.filled.clear()
    run.processes.fill()
    assert run.filled == [0, 1]


def test_without_any_server_a_publication_waits_until_one_answers(run: Run) -> None:
    run.processes.discard_all()
    run.processes.restore()
    run.processes.fill()
    assert run.states == ["ready", "ready"]


def test_servers_that_are_all_silent_end_the_run_with_their_causes(run: Run) -> None:
    run.cluster.silent.update(run.names)
    run.lose(0)
    run.lose(1)
    with pytest.raises(WorkerFailed) as raised:
        run.processes.restore()
    assert str(raised.value).startswith("rollout.engine.external: no server is left (")
    assert str(raised.value).count("nothing within 600 s") == 2
    assert run.lines.count("loss 0; the server is asked again") == 1


def test_servers_that_answer_and_never_load_the_weights_end_the_run_too(run: Run) -> None:
    run.cluster.refusing.update(run.names)
    with pytest.raises(WorkerFailed, match="no server is left .*no such folder.*no such folder"):
        run.processes.fill()


def test_one_server_that_never_loads_the_weights_holds_nobody_up(run: Run) -> None:
    run.cluster.refusing.add(run.names[0])
    run.processes.fill()
    assert run.states[1] == "ready" and run.states[0] != "ready"


def test_without_restarts_the_first_loss_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match="loss 0"):
        Run(monkeypatch, tmp_path, restarts=0).lose(0)
