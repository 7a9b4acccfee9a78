"""The processes that stand for external engines: SGLang servers that others have started, and start anew.

A server that is lost is asked again, and is filled with the current weights once it answers. Others go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.printable import Say
from megarl.recovery.engine_processes import EngineProcess, EngineProcesses

# the most that a server is left alone before it is asked again
_MOST_WAIT_S = 60.0
_MOST_DOUBLINGS = 6


@dataclass
class _Losses:
    """How often a server was lost, and the last cause.

    is_silent: it did not answer when it was asked last; is_spent: it is lost more often than run.restarts allows.
    """

    count: int = 0
    cause: Exception | None = None
    is_silent: bool = False
    is_spent: bool = False

    @property
    def wait_s(self) -> float:
        """How long the server is left alone: not at all after the first loss, then longer and longer."""
        if self.count < 2:
            return 0.0
        return min(_MOST_WAIT_S, 2.0 ** min(self.count - 2, _MOST_DOUBLINGS))


class ExternalEngineProcesses(EngineProcesses):
    """One process for each server, on a node of the run; it uses no GPU.

    Raises WorkerFailed where no server is left: none answers for run.timeout_s, or those that do are lost too often.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe, say: Say) -> None:
        self._servers = recipe.rollout.engine.external
        self._losses = [_Losses() for _ in self._servers]
        count = len(self._servers)
        slots = [index * recipe.placement.gpus // count for index in range(count)]
        super().__init__(cluster, recipe, slots, range(count), say)

    def _new_worker(self, index: int, slot: int) -> Worker:
        on_loss = partial(self._on_loss, index) if self._recipe.run.restarts else None
        name = f"engine {index} at {self._servers[index]}"
        return self._cluster.worker(name, slot, on_loss, gpus=0)

    def _start(self, engine: EngineProcess) -> None:
        if engine.state == "lost":
            self._cluster.replace_dead_nodes()
            engine.worker = self._new_worker(engine.index, engine.slot)
        engine.state = "starting"
        worker = engine.worker
        wait_s = self._losses[engine.index].wait_s
        target = "megarl.rollout.worker:RolloutWorker"
        started = worker.start(target, self._recipe, engine.index, None, wait_s)
        engine.calls = {started: worker.name}
        worker.watch("fail")

    def lose(self, engine: EngineProcess, worker: Worker, cause: Exception) -> None:
        """Ask the server again. Raises WorkerFailed with the causes where no server is left."""
        if engine.state == "lost" or engine.worker is not worker:
            return
        losses = self._losses[engine.index]
        losses.count += 1
        losses.cause = cause
        losses.is_silent = engine.state == "starting"
        if not losses.is_silent:
            self._cluster.loss_log.add(engine.worker.name, cause)
            losses.is_spent = not self._restarts.admit(engine.index)
        self.num_lost += 1
        self._discard(engine)
        if not (self._recipe.run.restarts and self._have_started):
            raise cause
        self._refuse_to_wait()
        self._say(f"{cause}; the server is asked again")
        self._start(engine)

    def _refuse_to_wait(self) -> None:
        """Raises WorkerFailed where no server is up, and none is worth waiting for."""
        is_up = any(engine.state not in ("lost", "starting") for engine in self.engines)
        if is_up or not all(losses.is_silent or losses.is_spent for losses in self._losses):
            return
        causes = "; ".join(str(losses.cause) for losses in self._losses)
        problem = f"rollout.engine.external: no server is left ({causes})"
        raise WorkerFailed(problem, problem)

    def restore(self) -> None:
        """Ask every server that is lost, and wait until one is up at least, and none is being filled."""
        for engine in self.engines:
            if engine.state == "lost":
                self._start(engine)
        while self._are_filling() or not any(
            engine.state in ("empty", "ready") for engine in self.engines
        ):
            self._advance(self._cluster.await_any(self.labels(), may_lose=True))

    def fill(self) -> None:
        """Give the current weights to all servers that are up; returns when these have them, or are lost.

        One has them at least. Those that are up later get them then.
        """
        for engine in self.ready:
            engine.state = "empty"
        self._fill_empty()
        while self._are_filling() or not self.ready:
            self._advance(self._cluster.await_any(self.labels(), may_lose=True))
            self._fill_empty()

    def take(self, ended: Sequence[Ref]) -> None:
        """Go on with the servers for which these calls have ended, and fill those that are up again."""
        self._advance(ended)
        self._fill_empty()

    def _are_filling(self) -> bool:
        return any(engine.state == "filling" for engine in self.engines)

    def _fill_empty(self) -> None:
        assert self.weights, "the first weights are published before anything is sampled"
        for engine in self.engines:
            if engine.state == "empty":
                engine.state = "filling"
                engine.calls = self.weights.begin_copy(engine, [])
