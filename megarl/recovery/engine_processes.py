"""The processes of a run's engines. An engine that is lost is started anew on its slots and filled with weights.

    starting -> sizing -> empty -> filling -> ready
                                 -> (a reshard) -> ready

An engine that is added while the run goes on takes the same way, beside the work of the others.
An engine is lost when one of its processes has died or hangs. It is sizing while it is asked for its capacity. While it
is filled, it gets the weights of engines that are ready; where there are none, all get those of the training ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from megarl.cluster.actor import Ref, Worker, failure, is_loss
from megarl.cluster.failures import WorkerFailed, reported
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.device import address_of, host_store
from megarl.printable import Say
from megarl.recovery.restarts import Restarts
from megarl.rollout.load_balancing import Capacity
from megarl.rollout.sglang.arguments import NodeSpan
from megarl.types import UserError

_COPIES = 3  # that are tried before an engine that cannot be filled is started anew
State = Literal["starting", "sizing", "empty", "filling", "ready", "lost"]


@dataclass(eq=False)
class EngineProcess:
    """An engine, by whichever processes serve it now.

    shares: whether other models use one of its GPUs. worker: the process that samples. parts: those on further nodes.
    calls: those that its start waits for, by worker. capacity: None until it has said it. has_session: whether it knows
    the exchanges of the run. is_released: whether its memory is the training ranks'. added_s: since when an engine
    starts that was added; None once it has joined the others.
    """

    index: int
    slot: int
    shares: bool
    worker: Worker
    parts: list[Worker] = field(default_factory=list)
    state: State = "starting"
    calls: dict[Ref, str] = field(default_factory=dict)
    capacity: Capacity | None = None
    has_session: bool = False
    is_released: bool = False
    copies_left: int = _COPIES
    added_s: float | None = None


class WeightSource(Protocol):
    """Fills engines with the weights that the others sample with."""

    def begin_copy(self, target: EngineProcess, sources: Sequence[EngineProcess]) -> dict[Ref, str]:
        """Begin to copy the weights of other engines; the target's calls, by worker."""
        ...

    def abandon_copies(self, engine: EngineProcess, reason: str) -> None:
        """Fail the copies that an engine took part in, which is lost: the others would wait for it."""
        ...

    def publish_again(self) -> None:
        """Fill all engines from the training ranks, while none samples."""
        ...


class EngineProcesses:
    """Starts the engines, and those anew that are lost; raises WorkerFailed where one is lost too often.

    have_memory: whether the memory of shared slots is the engines'. Where it is not, an engine that is lost is started
    by `restore`. is_beside_training: whether the training ranks' weights may be newer than the engines'.
    """

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        first_slots: Sequence[int],
        unshared: Sequence[int],
        say: Say,
    ) -> None:
        """first_slots: of each engine. unshared: the engines whose GPUs no other model uses."""
        self._cluster = cluster
        self._recipe = recipe
        self._say = say
        # rendezvous of engines on several nodes, served by this process
        self._stores: list[Any] = []
        self.engines: list[EngineProcess] = []
        for index, slot in enumerate(first_slots):
            worker = self._new_worker(index, slot)
            self.engines.append(EngineProcess(index, slot, index not in unshared, worker))
        self._restarts = Restarts(recipe.run.restarts, recipe.run.restart_window_s)
        self.weights: WeightSource | None = None
        self.have_memory = True
        self.is_beside_training = False
        self._have_started = False
        self.num_lost = 0

    def _new_worker(self, index: int, slot: int) -> Worker:
        on_loss = partial(self._on_loss, index) if self._recipe.run.restarts else None
        return self._cluster.worker(f"engine {index}", slot, on_loss, computes=True)

    def start(self) -> dict[Ref, str]:
        """Begin to start all engines, once; the calls to wait for."""
        calls: dict[Ref, str] = {}
        for engine in self.engines:
            self._start(engine)
            calls |= engine.calls
        return calls

    def _start(self, engine: EngineProcess) -> None:
        """Start an engine, with a process on each further node that it spans."""
        recipe = self._recipe
        if engine.state == "lost":
            self._cluster.replace_dead_nodes()
            engine.worker = self._new_worker(engine.index, engine.slot)
        engine.state = "starting"
        span = None
        if recipe.engine_nodes > 1:
            span = self._new_span()
        worker = engine.worker
        started = worker.start("megarl.rollout.worker:RolloutWorker", recipe, engine.index, span)
        engine.calls = {started: worker.name}
        worker.watch("fail")
        if span is None:
            return
        for node in range(1, span.nodes):
            name = f"{worker.name}, node {node}"
            slot = engine.slot + node * recipe.placement.gpus_per_node
            on_loss = partial(self._on_loss, engine.index) if recipe.run.restarts else None
            part = self._cluster.worker(name, slot, on_loss)
            node_span = replace(span, node=node, endpoint=span.endpoint.without_secret)
            target = "megarl.rollout.worker:EnginePart"
            engine.calls[part.start(target, recipe, engine.index, node_span)] = name
            part.watch("fail")
            engine.parts.append(part)

    def add(self, slots: Sequence[int]) -> None:
        """Begin to start further engines on these slots, which no other model uses; phases take in those that are up.

        The others keep their weights. No engine knows the exchanges any more, which have other members from now on.
        """
        for slot in slots:
            index = len(self.engines)
            worker = self._new_worker(index, slot)
            engine = EngineProcess(index, slot, False, worker, added_s=time.monotonic())
            self.engines.append(engine)
            self._start(engine)
        self.forget_sessions()

    def remove(self, count: int) -> None:
        """End so many engines, those with the highest numbers, in their own way. They must have nothing to sample."""
        leaving = self.engines[-count:]
        shutdowns: dict[Ref, str] = {}
        for engine in leaving:
            if self.weights:
                self.weights.abandon_copies(engine, "it leaves the run")
            if engine.state in ("empty", "ready"):
                for worker in (engine.worker, *engine.parts):
                    shutdowns[worker.call("shutdown")] = worker.name
            # from here on its end is no loss
            engine.state = "lost"
        self._cluster.outcomes(shutdowns)
        for engine in leaving:
            self._discard(engine)
        del self.engines[-count:]
        self.forget_sessions()

    def forget_sessions(self) -> None:
        """The next reshard opens new ones: of other members, or over new connections."""
        for engine in self.engines:
            engine.has_session = False

    def _new_span(self) -> NodeSpan:
        """The first node of an engine, with a new store and endpoint for all of its nodes."""
        from megarl.rollout.sglang.relay import new_endpoint  # ZeroMQ comes with SGLang

        recipe = self._recipe
        self._stores.append(host_store(recipe.run.timeout_s, self._cluster.host))
        return NodeSpan(recipe.engine_nodes, 0, address_of(self._stores[-1]), new_endpoint())

    @property
    def ready(self) -> list[EngineProcess]:
        """Those that have the current weights."""
        return [engine for engine in self.engines if engine.state == "ready"]

    def filled(self) -> None:
        """All engines have got the weights of a reshard."""
        for engine in self.engines:
            if engine.state == "empty":
                self._be_ready(engine, "the reshard")
            engine.has_session = engine.state == "ready"

    def _be_ready(self, engine: EngineProcess, source: str) -> None:
        engine.state = "ready"
        self._cluster.loss_log.is_back(engine.worker.name)
        if engine.added_s is not None:
            seconds = time.monotonic() - engine.added_s
            self._say(
                f"{engine.worker.name} has joined, {seconds:.1f} s after its start, with weights of {source}"
            )
            engine.added_s = None

    def _on_loss(self, index: int, cause: Exception) -> None:
        engine = self.engines[index]
        self.lose(engine, engine.worker, cause)

    def lose(self, engine: EngineProcess, worker: Worker, cause: Exception) -> None:
        """End what is left of an engine, and start it anew where its memory is not lent.

        worker: of the engine when it was lost; nothing happens where another has its place already. Raises WorkerFailed
        with the cause where the engine was lost too often.
        """
        if engine.state == "lost" or engine.worker is not worker:
            return
        self.num_lost += 1
        self._cluster.loss_log.add(engine.worker.name, cause)
        refusal = self._refusal(engine, cause)
        if refusal is None:
            # first: the end of processes that do not answer takes seconds
            self._say(f"{cause}; the engine is started anew")
        else:
            self._cluster.tell_hang(cause)
        self._discard(engine)
        if self.weights:
            self.weights.abandon_copies(engine, str(cause))
        if refusal:
            raise refusal
        if self.have_memory or not engine.shares:
            self._start(engine)

    def lose_named(self, cause: WorkerFailed) -> bool:
        """Whether the worker that has failed is an engine, which then is lost. Raises as `lose`."""
        for engine in self.engines:
            if engine.worker.name == cause.worker:
                self.lose(engine, engine.worker, cause)
                return True
        return False

    def _refusal(self, engine: EngineProcess, cause: Exception) -> Exception | None:
        """Counts a loss; what ends the run where the engine may not be started anew."""
        if not (self._recipe.run.restarts and self._have_started):
            return cause
        if self._restarts.admit(engine.slot):
            return None
        problem = f"{cause}; it was lost more than {self._recipe.run.restarts} times (run.restarts)"
        evidence = getattr(cause, "evidence", str(cause))
        memory = getattr(cause, "memory", None)
        return WorkerFailed(problem, evidence, engine.worker.name, memory)

    def _discard(self, engine: EngineProcess) -> None:
        """End what is left of an engine's processes."""
        for worker in (engine.worker, *engine.parts):
            self._cluster.end(worker)
        engine.state = "lost"
        engine.calls = {}
        engine.parts = []
        engine.capacity = None
        engine.has_session = False
        engine.is_released = False
        engine.copies_left = _COPIES

    def discard_all(self) -> None:
        """End all engines, because calls of work that was given up are open; `restore` starts them anew."""
        for engine in self.engines:
            # its process id may be another process's by now
            if engine.state != "lost":
                self._discard(engine)

    def started(self) -> None:
        """The calls of `start` have returned."""
        workers = [engine.worker for engine in self.engines]
        capacities = self._cluster.call_all(workers, "capacity")
        for engine, capacity in zip(self.engines, capacities, strict=True):
            engine.calls = {}
            engine.capacity = capacity
            engine.state = "empty"
        self._have_started = True

    def labels(self) -> dict[Ref, str]:
        """The calls that the starts of engines wait for."""
        calls: dict[Ref, str] = {}
        for engine in self.engines:
            calls |= engine.calls
        return calls

    def take(self, ended: Sequence[Ref]) -> None:
        """Go on with the engines for which these calls have ended, and fill those that are empty.

        Without an engine that is ready, all are filled together once all are started. Raises WorkerFailed where
        training goes on beside them, and has changed the weights.
        """
        self._advance(ended)
        empty = [engine for engine in self.engines if engine.state == "empty"]
        if not empty:
            return
        assert self.weights, "engines are started anew only once they have had weights"
        if sources := [engine for engine in self.ready if not engine.is_released]:
            for engine in empty:
                engine.state = "filling"
                engine.calls = self.weights.begin_copy(engine, sources)
        elif not self.labels():
            if self.is_beside_training:
                problem = "no engine is left with the weights that training has changed since"
                raise WorkerFailed(problem, problem, empty[0].worker.name)
            self.weights.publish_again()

    def lend_memory(self) -> None:
        """Before other models take the shared memory: end the engines that are being started there, for `restore`."""
        self.have_memory = False
        for engine in self.engines:
            if engine.shares and engine.state in ("starting", "sizing", "filling"):
                self._discard(engine)
                if self.weights:
                    self.weights.abandon_copies(engine, "its memory is handed over")

    def restore(self) -> None:
        """Start every engine that is lost, and wait until all are started; those are empty then."""
        while True:
            for engine in self.engines:
                if engine.state == "lost":
                    self._start(engine)
            calls = self.labels()
            if not calls:
                return
            self._advance(self._cluster.await_any(calls, may_lose=True))

    def _advance(self, ended: Sequence[Ref]) -> None:
        for engine in self.engines:
            calls = {ref: engine.calls[ref] for ref in ended if ref in engine.calls}
            failures = [(name, failure(ref)) for ref, name in calls.items()]
            failed = next(((name, error) for name, error in failures if error), None)
            if failed:
                self._take_failure(engine, *failed)
                continue
            for ref in calls:
                del engine.calls[ref]
            if calls and not engine.calls:
                self._enter_next(engine, calls)

    def _enter_next(self, engine: EngineProcess, calls: Mapping[Ref, str]) -> None:
        """The state after the one whose last calls these were."""
        if engine.state == "starting":
            engine.state = "sizing"
            engine.calls = {engine.worker.call("capacity"): engine.worker.name}
        elif engine.state == "sizing":
            engine.state = "empty"
            (engine.capacity,) = self._cluster.gather(calls)
        else:
            self._be_ready(engine, "the other engines")

    def _take_failure(self, engine: EngineProcess, name: str, error: Exception) -> None:
        """A call of an engine's start has failed: it is filled once more, or started anew."""
        if isinstance(error, UserError):
            raise error
        engine.copies_left -= 1
        if engine.state == "filling" and engine.copies_left and not is_loss(error):
            engine.state = "empty"
            engine.calls = {}
        else:
            self.lose(engine, engine.worker, reported(name, error))
