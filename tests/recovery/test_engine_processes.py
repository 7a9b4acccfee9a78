"""From which state to which an engine goes, and what it is filled from; its processes and Ray are stood in for.

Real ones die in tests/end_to_end/test_engine_losses.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.recovery import engine_processes
from megarl.recovery.engine_processes import EngineProcess, EngineProcesses
from megarl.rollout.load_balancing import Capacity
from megarl.types import ProcessLost, UserError
from megarl.types.losses import Losses
from tests.plan import plans

DEATH = WorkerFailed("engine 0: its process died", "traceback", "engine 0")


class Call:
    """A call to a worker; error: what it has raised."""

    def __init__(self, worker: str, method: str) -> None:
        self.worker = worker
        self.method = method
        self.error: Exception | None = None


class Worker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.watched: list[str] = []

    def start(self, target: str, *_: object) -> Call:
        return Call(self.name, "start")

    def call(self, method: str, *_: object) -> Call:
        return Call(self.name, method)

    def watch(self, method: str) -> None:
        self.watched.append(method)


class Cluster:
    """Its workers only exist. `await_any` lets all calls end; `dies`: engines whose start fails so often."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.ended: list[Worker] = []
        self.dies: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []
        self.loss_log = Losses()
        self.told: list[tuple[str, int]] = []

    def tell_hang(self, cause: Exception) -> None:
        self.told.append((str(cause), len(self.ended)))

    def worker(self, name: str, slot: int, on_loss: object, *, computes: bool) -> Worker:
        self.workers.append(Worker(name))
        return self.workers[-1]

    def replace_dead_nodes(self) -> None: ...

    def end(self, worker: Worker) -> None:
        self.ended.append(worker)

    def gather(self, calls: dict[Call, str]) -> list[Capacity]:
        assert all(call.method == "capacity" for call in calls)
        return [Capacity(4, 100)] * len(calls)

    def outcomes(self, calls: dict[Call, str]) -> list[None]:
        self.calls += [(call.worker, call.method) for call in calls]
        return [None] * len(calls)

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Capacity]:
        return [Capacity(4, 100)] * len(workers)

    def await_any(self, calls: dict[Call, str], *, may_lose: bool) -> list[Call]:
        for call in calls:
            if call.method == "start" and self.dies.get(call.worker):
                self.dies[call.worker] -= 1
                call.error = DEATH
        return [*calls]


class Weights:
    """Notes how engines are filled."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.abandoned: list[int] = []
        self.processes: Any = None

    def begin_copy(self, target: EngineProcess, sources: Sequence[EngineProcess]) -> Any:
        self.seen.append((target.index, [source.index for source in sources]))
        return {Call(target.worker.name, "receive_copy"): target.worker.name}

    def abandon_copies(self, engine: EngineProcess, reason: str) -> None:
        self.abandoned.append(engine.index)

    def publish_again(self) -> None:
        self.seen.append("published")
        self.processes.filled()


class Run:
    """Three engines that have their weights; engine 2 has a GPU of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **keys: Any) -> None:
        def failure(call: Call) -> Exception | None:
            return call.error

        monkeypatch.setattr(engine_processes, "failure", failure)
        self.lines: list[str] = []
        self.cluster: Any = Cluster()
        recipe = plans.recipe(tmp_path, "tiny", 2, run=keys)
        self.processes = EngineProcesses(
            self.cluster, recipe, [0, 1, 2], unshared=[2], say=self.lines.append
        )
        self.weights = Weights()
        self.weights.processes = self.processes
        self.processes.weights = self.weights
        assert len(self.processes.start()) == 3
        self.processes.started()
        self.processes.filled()

    @property
    def states(self) -> list[str]:
        return [engine.state for engine in self.processes.engines]

    def lose(self, index: int) -> None:
        engine = self.processes.engines[index]
        self.processes.lose(engine, engine.worker, DEATH)

    def lend(self) -> None:
        self.processes.lend_memory()
        self.processes.have_memory = True

    def go_on(self) -> None:
        """All calls that starts wait for end."""
        calls: Any = self.processes.labels()
        self.processes.take(self.cluster.await_any(calls, may_lose=True))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Run:
    return Run(monkeypatch, tmp_path)


def test_an_engine_that_is_lost_is_filled_from_those_that_are_ready(run: Run) -> None:
    before = run.processes.engines[0].worker
    run.lose(0)
    assert run.states == ["starting", "ready", "ready"]
    assert run.cluster.ended == [before]
    assert run.processes.engines[0].worker is not before
    assert run.lines == ["engine 0: its process died; the engine is started anew"]
    run.go_on()
    assert run.states[0] == "sizing"
    run.go_on()
    assert run.states[0] == "filling"
    assert run.weights.seen == [(0, [1, 2])]
    run.go_on()
    assert run.states == ["ready"] * 3
    assert run.processes.engines[0].capacity == Capacity(4, 100)
    assert not run.processes.engines[0].has_session, "the next exchange sends it"


def test_a_loss_that_is_told_again_counts_once(run: Run) -> None:
    engine = run.processes.engines[0]
    worker = engine.worker
    run.processes.lose(engine, worker, DEATH)
    run.processes.lose(engine, worker, DEATH)
    assert run.processes.num_lost == 1 and len(run.lines) == 1


def test_without_a_ready_engine_all_are_filled_together_once_all_are_started(run: Run) -> None:
    for index in range(3):
        run.lose(index)
    run.go_on()
    assert run.weights.seen == []
    run.go_on()
    assert run.weights.seen == ["published"]
    assert run.states == ["ready"] * 3
    assert all(engine.has_session for engine in run.processes.engines)


def test_beside_training_nothing_is_published_by_ranks_that_are_further(run: Run) -> None:
    run.processes.is_beside_training = True
    for index in range(3):
        run.lose(index)
    run.go_on()
    with pytest.raises(WorkerFailed, match="no engine is left with the weights"):
        run.go_on()


def test_an_engine_of_which_the_memory_is_lent_waits_for_the_reshard(run: Run) -> None:
    """So does one that was being started when the memory was lent; an engine with GPUs of its own does not wait."""
    run.lose(0)
    run.processes.lend_memory()
    assert run.states == ["lost", "ready", "ready"]
    run.lose(1)
    run.lose(2)
    assert run.states == ["lost", "lost", "starting"]
    run.processes.have_memory = True
    run.processes.restore()
    assert run.states == ["empty"] * 3
    assert run.processes.num_lost == 3, "an engine that was ended for its memory is not lost"
    run.processes.filled()
    assert run.states == ["ready"] * 3


def test_engines_do_not_wait_for_one_that_is_ended_while_they_fill_it(run: Run) -> None:
    """Because its memory is wanted by others."""
    run.lose(0)
    while run.states[0] != "filling":
        run.go_on()
    run.weights.abandoned.clear()
    run.processes.lend_memory()
    assert (run.states[0], run.weights.abandoned) == ("lost", [0])


def test_what_is_left_of_an_engine_is_killed_once(run: Run) -> None:
    run.processes.have_memory = False
    run.lose(0)
    ended = [worker.name for worker in run.cluster.ended]
    run.processes.discard_all()
    assert [worker.name for worker in run.cluster.ended] == [*ended, "engine 1", "engine 2"]


def test_engines_with_released_memory_are_no_source(run: Run) -> None:
    run.processes.engines[1].is_released = True
    run.lose(0)
    run.go_on()
    run.go_on()
    assert run.weights.seen == [(0, [2])]


def test_a_copy_that_fails_is_begun_again_and_then_the_engine_is_started_anew(run: Run) -> None:
    run.lose(0)
    run.go_on()
    run.go_on()
    for copies in (2, 3):
        (call,) = run.processes.engines[0].calls
        failed: Any = call
        failed.error = RuntimeError("a source is gone")
        run.processes.take([call])
        assert run.states[0] == "filling" and len(run.weights.seen) == copies
    (call,) = run.processes.engines[0].calls
    failed = call
    failed.error = RuntimeError("a source is gone")
    run.processes.take([call])
    assert run.states[0] == "starting" and run.processes.num_lost == 2


def test_a_start_that_fails_is_repeated_as_often_as_restarts_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    run = Run(monkeypatch, tmp_path, restarts=2)
    run.processes.have_memory = False
    run.lose(0)
    run.cluster.dies = {"engine 0": 1}
    run.processes.restore()
    assert run.states[0] == "empty" and run.processes.num_lost == 2
    assert run.cluster.told == [], "the run goes on"
    num_ended = len(run.cluster.ended)
    with pytest.raises(WorkerFailed, match=r"died; it was lost more than 2 times \(run.restarts\)"):
        run.lose(0)
    assert run.cluster.told == [(str(DEATH), num_ended)], "before its processes are gone"


def test_without_restarts_the_first_loss_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    run = Run(monkeypatch, tmp_path, restarts=0)
    with pytest.raises(WorkerFailed, match="^engine 0: its process died$"):
        run.lose(0)


def test_a_users_error_in_a_start_is_raised_as_it_is(run: Run) -> None:
    run.lose(0)
    (call,) = run.processes.engines[0].calls
    failed: Any = call
    failed.error = UserError("reward.function", "cannot be imported", "install it")
    with pytest.raises(UserError, match="cannot be imported"):
        run.processes.take([call])


def test_an_engine_that_is_lost_while_it_is_filled_is_started_anew(run: Run) -> None:
    run.lose(0)
    run.go_on()
    run.go_on()
    (call,) = run.processes.engines[0].calls
    failed: Any = call
    failed.error = type("Dead", (RuntimeError, ProcessLost), {})("killed")
    run.processes.take([call])
    assert run.states[0] == "starting" and run.processes.num_lost == 2


def test_engines_that_are_added_start_beside_the_others_and_are_filled_by_them(run: Run) -> None:
    run.processes.add([3, 4])
    assert run.states == ["ready"] * 3 + ["starting"] * 2
    assert [engine.slot for engine in run.processes.engines] == [0, 1, 2, 3, 4]
    assert not any(engine.has_session for engine in run.processes.engines), "of other members"
    run.go_on()
    run.go_on()
    assert run.weights.seen == [(3, [0, 1, 2]), (4, [0, 1, 2])]
    assert run.lines == []
    run.go_on()
    assert run.states == ["ready"] * 5
    words = r"engine 3 has joined, \d+\.\d s after its start, with weights of the other engines"
    assert re.fullmatch(words, run.lines[0]) and len(run.lines) == 2
    run.lose(3)
    run.processes.restore()
    run.processes.filled()
    assert run.lines[2:] == ["engine 0: its process died; the engine is started anew"], (
        "it has joined once"
    )


def test_an_engine_that_is_added_late_gets_the_weights_of_the_reshard(run: Run) -> None:
    run.processes.add([3])
    run.lend()
    assert run.states == ["ready"] * 3 + ["starting"], "its GPU is nobody else's"
    run.processes.restore()
    run.processes.filled()
    assert run.states == ["ready"] * 4
    assert run.lines[0].endswith("with weights of the reshard")
    assert all(engine.has_session for engine in run.processes.engines)


def test_the_last_engines_leave_in_their_own_way_and_none_is_lost(run: Run) -> None:
    run.processes.add([3])
    leaving = [engine.worker for engine in run.processes.engines[2:]]
    run.processes.remove(2)
    assert run.cluster.calls == [("engine 2", "shutdown")], "engine 3 was not up"
    assert run.cluster.ended == leaving and run.weights.abandoned == [2, 3]
    assert run.states == ["ready"] * 2 and run.processes.labels() == {}
    assert not any(engine.has_session for engine in run.processes.engines)
    assert run.processes.num_lost == 0 and run.lines == []


def test_the_end_of_an_engine_that_leaves_is_no_loss(run: Run) -> None:
    """Its process may die while it is waited for."""
    cluster: Any = run.cluster

    def outcomes(calls: dict[Call, str]) -> list[Exception]:
        run.lose(2)
        return [DEATH]

    cluster.outcomes = outcomes
    run.processes.remove(1)
    assert run.processes.num_lost == 0 and len(run.processes.engines) == 2
    run.processes.add([2])
    assert run.states == ["ready", "ready", "starting"]
