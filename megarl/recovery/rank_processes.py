"""The processes of one Megatron world, which begin and end together: without one of them no other can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megarl import device
from megarl.cluster.actor import Ref, Worker
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.placement.roles import Role

LossKind = Literal["death", "hang", "error"]


@dataclass(frozen=True)
class RankLoss:
    """Why the processes of a world are no longer there: which rank failed, on which GPU slot, and how.

    is_trained: whether a state is lost with them, and not only weights of a checkpoint that they began with.
    """

    rank: str
    slot: int
    kind: LossKind
    cause: WorkerFailed
    is_trained: bool


class RankProcesses:
    """The workers of one group of ranks: rank r is on the slot `role.first_slot` + r.

    Whoever has made it starts it, and starts it again after a loss. When a rank dies or hangs, all others are ended at
    once, so that nobody waits for them: each call that is open fails. loss: the reason, until they are started again.
    """

    def __init__(
        self,
        cluster: Cluster,
        role: Role,
        *,
        name: str,
        target: str,
        more: Sequence[object] = (),
    ) -> None:
        """name: of a rank, for people. target: its class; more: its last arguments."""
        self._cluster = cluster
        self._role = role
        self._name = name
        self._target = target
        self._more = more
        self._is_replaceable = role.recipe.run.restarts > 0
        self._store: Any = None
        self.workers: list[Worker] = []
        self.loss: RankLoss | None = None

    def start(self) -> dict[Ref, str]:
        """Begin to start all ranks, which meet at a new store; the calls to wait for."""
        self.loss = None
        # it is served as long as this object has it
        self._store = device.host_store(self._role.recipe.run.timeout_s, self._cluster.host)
        meet = device.address_of(self._store)
        self.workers = []
        started = {}
        for rank, slot in enumerate(self._role.slots):
            on_loss = partial(self._on_loss, rank) if self._is_replaceable else None
            worker = self._cluster.worker(f"{self._name} {rank}", slot, on_loss, computes=True)
            started[worker.start(self._target, rank, self._role, meet, *self._more)] = worker.name
            self.workers.append(worker)
        return started

    def _on_loss(self, rank: int, cause: Exception) -> None:
        worker = self.workers[rank]
        kind = "death" if self._cluster.has_ended(worker) else "hang"
        self._end(worker, kind, cause)

    def end_for(self, failure: WorkerFailed) -> None:
        """End all ranks if the one that has failed is among them."""
        for worker in self.workers:
            if worker.name == failure.worker and not self.loss:
                self._end(worker, self._kind(worker), failure)

    def _kind(self, worker: Worker) -> LossKind:
        if self._cluster.is_stopped(worker):
            return "hang"
        if self._cluster.has_ended(worker):
            return "death"
        return "error"

    def _end(self, worker: Worker, kind: LossKind, cause: Exception) -> None:
        """End all ranks, because of what has become of one of them."""
        if self.loss:
            return
        if not isinstance(cause, WorkerFailed):
            cause = WorkerFailed(str(cause), str(cause), worker.name)
        self.loss = RankLoss(worker.name, worker.slot, kind, cause, self._role.trains)
        if kind == "hang":
            # it may be on a node that does not answer: ending what is there takes a while
            self._cluster.say(f"{cause}; the ranks are ended")
        self._cluster.end_all(self.workers)

    def discard(self) -> None:
        """End all ranks, though none of them has failed."""
        if not self.loss:
            self._cluster.end_all(self.workers)
