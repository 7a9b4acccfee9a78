"""The training ranks and the engines of a run, as the controller sees them: every method is one fan-out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from megarl import device
from megarl.algos import ALGORITHMS
from megarl.batching import SampleRef, Update, plan_updates
from megarl.cluster import Cluster, Ref, WorkerFailed
from megarl.config import Recipe
from megarl.flops import speed, train_work
from megarl.memory import Lender
from megarl.parallel.hf_config import model_shape
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.parallel.placement import engine_layout, shared_slots, train_layout
from megarl.resharding.member import Stats, collect_stats
from megarl.resharding.session import Sessions, sessions
from megarl.rollout.episodes import Sampling
from megarl.snapshots import Digest
from megarl.trainer import Published
from megarl.types import GroupSummary, Metrics, Prompt, SampleGroup


@dataclass(frozen=True)
class Rollout:
    """Groups as the controller holds them: summaries here, samples in the object store; index i is the same group."""

    summaries: list[GroupSummary]
    refs: list[Ref]


class TrainingRanks:
    """All ranks of the Megatron world; rank r is on GPU slot r. Those on `shared` slots give memory to an engine."""

    def __init__(
        self, cluster: Cluster, recipe: Recipe, layout: TrainLayout, shared: range, store: TCPStore
    ) -> None:
        self._cluster, self._recipe, self._layout = cluster, recipe, layout
        self._shape = model_shape(recipe.model.path)
        self._store = store  # the ranks meet there: it is served as long as this object lives
        self.workers = [cluster.worker(f"training rank {rank}", rank) for rank in range(layout.world_size)]
        self.started = {
            worker.start("megarl.trainer:Trainer", rank, recipe, store.port): worker.name
            for rank, worker in enumerate(self.workers)
        }
        self._lenders = [self.workers[slot] for slot in shared]
        self.speed: Metrics = {}  # of the last call of `train`

    def onload(self) -> None:
        self._cluster.call_all(self._lenders, "onload")

    def offload(self) -> None:
        self._cluster.call_all(self._lenders, "offload")

    def held_bytes(self) -> int:
        """Memory of the rank on a shared slot that holds most; 0 where none is shared."""
        return max(self._cluster.call_all(self._lenders, "held_bytes"), default=0)

    def save(self, folder: Path) -> None:
        """Begin a checkpoint: what is to be written is copied when this returns."""
        self._call("save", folder)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until all files are written; their digests, as far as the ranks took them."""
        found: dict[str, Digest] = {}
        for of_rank in self._cluster.call_all(self.workers, "finish_save"):
            found |= of_rank
        return found

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def load_weights(self, folder: Path) -> None:
        self._call("load_weights", folder)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._call("export", folder)

    def _call(self, method: str, *args: object) -> None:
        self._cluster.gather({worker.call(method, *args): worker.name for worker in self.workers})

    def publish(self) -> list[Published]:
        """Each rank's handles to its parameters."""
        return self._cluster.call_all(self.workers, "publish")

    def train(self, algorithm: str, samples: Sequence[SampleRef], refs: Sequence[Ref], lr: float) -> list[Metrics]:
        """All optimizer updates of one step. Each rank fetches the groups that hold its own share, and no others.

        Metrics of each update: the loss's statistics are sums, or maxima where the name ends in _max.
        """
        train = self._recipe.train
        updates = plan_updates(
            samples,
            updates=train.updates_per_step,
            dp=self._layout.dp,
            token_budget=train.tokens_per_micro_batch,
            mean_over=ALGORITHMS[algorithm].mean_over,
            work=train_work(self._shape),
            align=self._layout.tokens_align,
            multiple=self._layout.pp if self._layout.vpp > 1 else 1,  # as an interleaved pipeline takes them
        )
        calls, began = {}, time.perf_counter()
        for rank, worker in enumerate(self.workers):
            share = _share(updates, self._layout.coords(rank).dp)
            needed = sorted({one.group for update in share for batch in update.micro_batches[0] for one in batch})
            call = worker.call("train", algorithm, share, lr, needed, *(refs[group] for group in needed))
            calls[call] = worker.name
        merged: list[Metrics] = [{} for _ in updates]
        for of_rank in self._cluster.gather(calls):
            for metrics, more in zip(merged, of_rank, strict=True):
                metrics |= more
        lengths, seconds = [one.length for one in samples], time.perf_counter() - began
        self.speed = speed(self._shape, lengths, seconds, self._layout.world_size, device.name())
        return merged


def trainers_alone(cluster: Cluster, recipe: Recipe) -> TrainingRanks:
    """Training ranks of a run without engines: they keep their memory in every phase."""
    ranks = TrainingRanks(cluster, recipe, train_layout(recipe), range(0), device.host_store(recipe.run.timeout_s))
    cluster.gather(ranks.started)
    return ranks


def _share(updates: Sequence[Update], dp_rank: int) -> list[Update]:
    """One data-parallel rank's part of each update."""
    return [replace(update, micro_batches=(update.micro_batches[dp_rank],)) for update in updates]


class Engines:
    """All SGLang engines as one; engine e starts on GPU slot first + e * tp. Those on `shared` slots lend memory."""

    def __init__(self, cluster: Cluster, recipe: Recipe, layout: EngineLayout, shared: range) -> None:
        self._cluster = cluster
        starts = [layout.first + index * layout.tp for index in range(layout.count)]
        self.workers = [cluster.worker(f"engine {index}", slot) for index, slot in enumerate(starts)]
        self.started = {
            worker.start("megarl.rollout.episodes:RolloutWorker", recipe, index): worker.name
            for index, worker in enumerate(self.workers)
        }
        # SGLang's ranks give their memory together, so that an engine on one shared GPU gives it on all of its own.
        self._lenders = [worker for worker, slot in zip(self.workers, starts, strict=True) if slot in shared]

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollout:
        """One group per prompt, in order; prompts are dealt round over the engines, which batch them themselves."""
        summaries, refs = {}, []
        for index, prompt in enumerate(prompts):
            worker = self.workers[index % len(self.workers)]
            own = replace(sampling, stream=(*sampling.stream, index))
            summary, group = worker.call_two("sample", prompt, own)
            summaries[summary] = worker.name
            refs.append(group)
        return Rollout(self._cluster.gather(summaries), refs)

    def versions(self) -> list[int]:
        """The weights' version that each engine says it has."""
        return self._cluster.call_all(self.workers, "version")

    def check(self) -> None:
        """Raises WorkerFailed with the words of an engine of which a process has died."""
        self._cluster.call_all(self.workers, "check")

    def release_memory(self) -> None:
        self._cluster.call_all(self._lenders, "release_memory")

    def resume_weights(self) -> None:
        self._cluster.call_all(self._lenders, "resume_weights")

    def resume_cache(self) -> None:
        self._cluster.call_all(self._lenders, "resume_cache")

    def shutdown(self) -> None:
        self._cluster.call_all(self.workers, "shutdown")


class Fleet:
    """Both sides on their GPUs. Starts them side by side; `version` counts the publications of the weights."""

    def __init__(self, cluster: Cluster, recipe: Recipe, say: Callable[[str], None]) -> None:
        """say: tells the user in a line what was mended on the way."""
        self._cluster, self._recipe, self._say = cluster, recipe, say
        self._train_layout, self._engine_layout = train_layout(recipe), engine_layout(recipe)
        shared = shared_slots(self._train_layout, self._engine_layout)
        self._store = device.host_store(recipe.run.timeout_s)
        self._run_id = secrets.token_hex(8)
        self.trainers = TrainingRanks(cluster, recipe, self._train_layout, shared, self._store)
        self.engines = Engines(cluster, recipe, self._engine_layout, shared)
        cluster.gather(self.trainers.started | self.engines.started)
        self.trainers.offload()  # built with everything: from here on the phases say who holds what
        self.memory = Lender(self.trainers, self.engines)
        self._sessions = self._open_sessions()
        self.version = -1
        self.attempts = 0  # of publishing; more than there are versions once one had to be repeated
        self._have_sessions = False  # the engines, from the first publication on

    def put(self, groups: Sequence[SampleGroup]) -> list[Ref]:
        """Place groups that no engine made where the training ranks can fetch them."""
        return [self._cluster.put(group) for group in groups]

    def fetch(self, rollout: Rollout) -> list[SampleGroup]:
        """The groups themselves, which are then in this process too."""
        return self._cluster.gather(dict.fromkeys(rollout.refs, "samples"))

    def publish(self) -> Stats:
        """Move the trained weights into the engines, in place, and leave the GPUs' memory to them.

        An exchange that fails is tried once more while every process is alive: it writes everything anew, and between
        the two the engines refuse to sample. Raises WorkerFailed when that fails too or a process is gone, and
        RuntimeError if an engine then states another version than the trainer's.
        """
        if self.memory.phase == "train":
            self.memory.lend("reshard")
        version = self.version + 1
        calls = self._exchange(version)
        try:
            self._cluster.gather(calls)
        except WorkerFailed as failure:
            self.engines.check()
            if not self._cluster.settle(calls):
                raise
            self._say(f"the reshard to version {version} failed and is tried once more: {failure}")
            self._cluster.gather(self._exchange(version))
        versions = self.engines.versions()
        if any(one != version for one in versions):
            raise RuntimeError(f"the engines are at versions {versions}, the trainer is at {version}")
        self.version, self._have_sessions = version, True
        self.memory.lend("rollout")
        num_members = max(self._train_layout.world_size, self._engine_layout.end)
        return collect_stats(self._store, self._run_id, self.attempts, num_members)

    def _exchange(self, version: int) -> dict[Ref, str]:
        """Ask every member to take part in one attempt. Engines keep their session from the first that succeeded."""
        self.attempts += 1
        calls: dict[Ref, str] = {}
        for index, worker in enumerate(self.engines.workers):
            message = self._sessions.engine_message(index, version, self.attempts, not self._have_sessions)
            calls[worker.call("reshard", message, version)] = worker.name
        for rank, session in self._sessions.trainers.items():
            worker = self.trainers.workers[rank]
            calls[worker.call("reshard", session, version, self.attempts)] = worker.name
        return calls

    def go_on(self, folder: Path, version: int, attempts: int) -> None:
        """Load a checkpoint whose weights' last publication was `version`: the next is the one after it."""
        self.memory.lend("train")
        self.trainers.load(folder)
        self.version, self.attempts = version, attempts

    def shutdown(self) -> None:
        """End the engines in their own way; the cluster ends every process that is left."""
        self.engines.shutdown()

    def _open_sessions(self) -> Sessions:
        handles = self.trainers.publish()
        return sessions(
            [one.source for one in handles],
            store_port=self._store.port,
            run_id=self._run_id,
            shape=model_shape(self._recipe.model.path),
            train=self._train_layout,
            engine=self._engine_layout,
            transformer_engine=handles[0].transformer_engine,
            dtype=self._recipe.model.dtype,
            round_bytes=self._recipe.reshard.round_bytes,
            timeout_s=self._recipe.run.timeout_s,
            gpus_per_node=self._recipe.placement.gpus_per_node,
            verify=self._recipe.reshard.verify,
        )
