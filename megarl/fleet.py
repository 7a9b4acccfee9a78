"""The training ranks and the engines of a run, as the controller sees them: every method is one fan-out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from megarl import checkpoint, device
from megarl.algos import ALGORITHMS
from megarl.batching import SampleRef, Update, plan_updates
from megarl.cluster import Cluster, Ref
from megarl.config import Recipe
from megarl.memory import Lender
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.resharding.member import Sessions, Stats, collect_stats, sessions
from megarl.rollout.episodes import Sampling
from megarl.trainer import Published
from megarl.types import GroupSummary, Metrics, Prompt, SampleGroup


@dataclass(frozen=True)
class Rollout:
    """Groups as the controller holds them: summaries here, samples in the object store; index i is the same group."""

    summaries: list[GroupSummary]
    refs: list[Ref]


class TrainingRanks:
    """All ranks of the Megatron world; rank r is on GPU slot r."""

    def __init__(self, cluster: Cluster, recipe: Recipe, layout: TrainLayout, store_port: int) -> None:
        self._cluster, self._recipe, self._layout = cluster, recipe, layout
        self.workers = [cluster.worker(f"training rank {rank}", rank) for rank in range(layout.world_size)]
        self.started = {
            worker.start("megarl.trainer:Trainer", rank, recipe, store_port): worker.name
            for rank, worker in enumerate(self.workers)
        }

    def onload(self) -> None:
        self._cluster.call_all(self.workers, "onload")

    def offload(self) -> None:
        self._cluster.call_all(self.workers, "offload")

    def publish(self) -> list[Published]:
        """Each rank's handles to its parameters."""
        return self._cluster.call_all(self.workers, "publish")

    def train(self, algorithm: str, samples: Sequence[SampleRef], refs: Sequence[Ref], lr: float) -> Metrics:
        """All optimizer updates of one step. Each rank fetches the groups that hold its own share, and no others.

        Metrics are over all updates: the loss's statistics are sums, or maxima where the name ends in _max.
        """
        train = self._recipe.train
        updates = plan_updates(
            samples,
            updates=train.updates_per_step,
            dp=self._layout.dp,
            token_budget=train.tokens_per_micro_batch,
            mean_over=ALGORITHMS[algorithm].mean_over,
        )
        calls = {}
        for rank, worker in enumerate(self.workers):
            share = _share(updates, self._layout.coords(rank).dp)
            needed = sorted({one.group for update in share for batch in update.micro_batches[0] for one in batch})
            call = worker.call("train", algorithm, share, lr, needed, *(refs[group] for group in needed))
            calls[call] = worker.name
        merged: Metrics = {}
        for metrics in self._cluster.gather(calls):
            merged |= metrics
        return merged


def _share(updates: Sequence[Update], dp_rank: int) -> list[Update]:
    """One data-parallel rank's part of each update."""
    return [Update((update.micro_batches[dp_rank],), update.denominator) for update in updates]


class Engines:
    """All SGLang engines as one; engine e starts on GPU slot e * tp."""

    def __init__(self, cluster: Cluster, recipe: Recipe, layout: EngineLayout) -> None:
        self._cluster = cluster
        self.workers = [cluster.worker(f"engine {index}", index * layout.tp) for index in range(layout.count)]
        self.started = {
            worker.start("megarl.rollout.episodes:RolloutWorker", recipe, index): worker.name
            for index, worker in enumerate(self.workers)
        }

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollout:
        """One group per prompt, in order; prompts are dealt round over the engines, which batch them themselves."""
        summaries, refs = {}, []
        for index, prompt in enumerate(prompts):
            worker = self.workers[index % len(self.workers)]
            summary, group = worker.call_two("sample", prompt, sampling)
            summaries[summary] = worker.name
            refs.append(group)
        return Rollout(self._cluster.gather(summaries), refs)

    def versions(self) -> list[int]:
        """The weights' version that each engine says it has."""
        return self._cluster.call_all(self.workers, "version")

    def release_memory(self) -> None:
        self._cluster.call_all(self.workers, "release_memory")

    def resume_weights(self) -> None:
        self._cluster.call_all(self.workers, "resume_weights")

    def resume_cache(self) -> None:
        self._cluster.call_all(self.workers, "resume_cache")

    def shutdown(self) -> None:
        self._cluster.call_all(self.workers, "shutdown")


class Fleet:
    """Both sides on the same GPUs. Starts them side by side; `version` counts the publications of the weights."""

    def __init__(self, cluster: Cluster, recipe: Recipe) -> None:
        self._cluster, self._recipe = cluster, recipe
        train, engine = recipe.train, recipe.rollout.engine
        self._train_layout = TrainLayout(recipe.placement.gpus, train.tp, train.pp, train.ep)
        self._engine_layout = EngineLayout(engine.count, engine.tp, engine.ep)
        self._store = device.host_store(recipe.run.timeout_s)
        self._run_id = secrets.token_hex(8)
        self.trainers = TrainingRanks(cluster, recipe, self._train_layout, self._store.port)
        self.engines = Engines(cluster, recipe, self._engine_layout)
        cluster.gather(self.trainers.started | self.engines.started)
        self.trainers.offload()  # built with everything: from here on the phases say who holds what
        self.memory = Lender(self.trainers, self.engines)
        self._sessions = self._open_sessions()
        self.version = -1

    def put(self, groups: Sequence[SampleGroup]) -> list[Ref]:
        """Place groups that no engine made where the training ranks can fetch them."""
        return [self._cluster.put(group) for group in groups]

    def publish(self) -> Stats:
        """Move the trained weights into the engines, in place, and leave the GPUs' memory to them.

        Raises RuntimeError if an engine then states another version than the trainer's.
        """
        if self.memory.phase == "train":
            self.memory.lend("reshard")
        self.version += 1
        calls: dict[Ref, str] = {}
        for index, worker in enumerate(self.engines.workers):
            message = self._sessions.engine_message(index, self.version, first=self.version == 0)
            calls[worker.call("reshard", message, self.version)] = worker.name
        for rank, session in self._sessions.trainers.items():
            worker = self.trainers.workers[rank]
            calls[worker.call("reshard", session, self.version)] = worker.name
        self._cluster.gather(calls)
        versions = self.engines.versions()
        if any(version != self.version for version in versions):
            raise RuntimeError(f"the engines are at versions {versions}, the trainer is at {self.version}")
        self.memory.lend("rollout")
        return collect_stats(self._store, self._run_id, self.version, self._train_layout.world_size)

    def shutdown(self) -> None:
        """End the engines in their own way; the cluster ends every process that is left."""
        self.engines.shutdown()

    def _open_sessions(self) -> Sessions:
        handles = self.trainers.publish()
        return sessions(
            [one.source for one in handles],
            store_port=self._store.port,
            run_id=self._run_id,
            shape=checkpoint.model_shape(self._recipe.model.path),
            train=self._train_layout,
            engine=self._engine_layout,
            transformer_engine=handles[0].transformer_engine,
            dtype=self._recipe.model.dtype,
            round_bytes=self._recipe.reshard.round_bytes,
            timeout_s=self._recipe.run.timeout_s,
        )
