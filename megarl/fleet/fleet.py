"""The training ranks and the engines of a run, as the controller sees them: every method is one fan-out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl import device
from megarl.checkpoints.snapshots import Digest
from megarl.cluster.actor import Ref, Worker
from megarl.cluster.session import Cluster, WorkerFailed
from megarl.cluster.topology import device_placement_faults, device_placement_lines
from megarl.config import Recipe
from megarl.device import address_of, host_store
from megarl.fleet.memory import MemoryScheduler
from megarl.fleet.rank_groups import AuxiliaryRanks, RewardRanks, RolloutBatch, TrainingRanks
from megarl.parallel.layout import EngineLayout
from megarl.parallel.roles import resolve
from megarl.resharding.member import Stats, collect_stats
from megarl.resharding.session import Sessions, sessions
from megarl.rollout.episodes import Sampling, summary
from megarl.rollout.sample_file import open_samples, writing
from megarl.rollout.sglang.arguments import NodeSpan
from megarl.types import Prompt, SampleGroup

CRITIC = "critic"  # folder of its part of a checkpoint
CARRIED = "carried.parquet"  # samples that wait for the next step


class Engines:
    """All SGLang engines as one; engine e is on GPU slots from first + e * tp. Those on `shared` slots lend memory."""

    def __init__(self, cluster: Cluster, recipe: Recipe, layout: EngineLayout, shared: frozenset[int]) -> None:
        self._cluster, self._recipe = cluster, recipe
        self._slots = [layout.first + index * layout.tp for index in range(layout.count)]
        self.workers = [cluster.worker(f"engine {index}", slot) for index, slot in enumerate(self._slots)]
        self._stores: list[Any] = []  # where the ranks of engines on several nodes meet, served by this process
        self._parts: list[Worker] = []
        self._started: dict[Ref, str] = {}
        # SGLang's ranks give their memory together, so that an engine on one shared GPU gives it on all of its own.
        engines = zip(self.workers, self._slots, strict=True)
        self._lenders = [worker for worker, slot in engines if shared & {*range(slot, slot + layout.tp)}]

    @property
    def measures_shared_memory(self) -> bool:
        """Whether a start depends on what ranks hold: on a GPU SGLang sizes its cache by what is free then."""
        return device.DEVICE == "cuda" and bool(self._lenders)

    def start(self) -> dict[Ref, str]:
        """Begin to start all of them, once; what to wait for."""
        for index, (worker, slot) in enumerate(zip(self.workers, self._slots, strict=True)):
            self._start(index, worker, slot)
        return self._started

    def _start(self, index: int, worker: Worker, slot: int) -> None:
        """An engine, with a process on each further node of it."""
        recipe = self._recipe
        span = self._span(recipe) if recipe.engine_nodes > 1 else None
        self._started[worker.start("megarl.rollout.episodes:RolloutWorker", recipe, index, span)] = worker.name
        if span is None:
            return
        for node in range(1, span.nodes):
            name, at = f"{worker.name}, node {node}", slot + node * recipe.placement.gpus_per_node
            part, own = self._cluster.worker(name, at), replace(span, node=node, door=span.door.for_guests)
            self._started[part.start("megarl.rollout.episodes:EnginePart", recipe, index, own)] = name
            part.watch("fail")
            self._parts.append(part)

    def _span(self, recipe: Recipe) -> NodeSpan:
        """The first of an engine's nodes, with a store and a key for all of them."""
        from megarl.rollout.sglang.relay import new_endpoint  # ZeroMQ comes with SGLang

        self._stores.append(host_store(recipe.run.timeout_s, self._cluster.host))
        return NodeSpan(recipe.engine_nodes, 0, address_of(self._stores[-1]), new_endpoint())

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> RolloutBatch:
        """One group per prompt, in order; prompts are dealt round over the engines, which batch them themselves."""
        summaries, refs = {}, []
        for index, prompt in enumerate(prompts):
            worker = self.workers[index % len(self.workers)]
            own = replace(sampling, stream=(*sampling.stream, index))
            summary, group = worker.call_many(2, "sample", prompt, own)
            summaries[summary] = worker.name
            refs.append(group)
        return RolloutBatch(self._cluster.gather(summaries), refs)

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
        self._cluster.call_all([*self.workers, *self._parts], "shutdown")


class Fleet:
    """Both sides on their GPUs. Starts them side by side, or engines behind ranks whose memory they measure.

    `version` counts the publications of the weights.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe, say: Callable[[str], None], *, learns: bool = True) -> None:
        """say: tells the user in a line what was mended on the way. learns: or nobody asks for values."""
        self._cluster, self._recipe, self._say = cluster, recipe, say
        roles = resolve(recipe, learns=learns)
        self._roles, shared = roles, roles.shared_slots
        self._run_id = secrets.token_hex(8)
        self.trainers = TrainingRanks(cluster, roles.policy, shared)
        self._store = self.trainers.store
        self.engines = Engines(cluster, recipe, roles.engines, shared)
        self.critic = AuxiliaryRanks(cluster, roles.critic, shared) if roles.critic else None
        self.reward_model = RewardRanks(cluster, roles.reward_model, shared) if roles.reward_model else None
        computing = [one for one in (self.trainers, self.critic, self.reward_model) if one]
        waits = self.engines.measures_shared_memory
        starting = {} if waits else self.engines.start()
        cluster.gather(starting | {ref: name for ranks in computing for ref, name in ranks.started.items()})
        for ranks in computing:
            ranks.offload()  # built with everything: from here on the phases say who holds what
        if waits:
            cluster.gather(self.engines.start())
        if recipe.placement.node_gpus:
            self._say_seats()
        if taken := max(cluster.call_all(self.trainers.workers, "communicator_bytes"), default=0):
            say(f"each of NCCL's groups takes {taken} bytes of a training GPU: communicator_bytes of a hardware file")
        self.memory = MemoryScheduler(self.trainers, self.engines, self.critic, self.reward_model)
        self._sessions = self._open_sessions()
        self.version = -1
        self._digests: dict[str, Digest] = {}  # of the policy's part of a checkpoint, where its files are written
        self.attempts = 0  # of publishing; more than there are versions once one had to be repeated
        self.carried = RolloutBatch([], [])  # groups that a step had too many of, for the next
        self._have_sessions = False  # the engines, from the first publication on

    def _say_seats(self) -> None:
        """Which training rank sits where, and what of it slows the fabric down."""
        device_placements = self._cluster.device_placements(self.trainers.workers, self._recipe.placement)
        for line in [*device_placement_lines(device_placements), *map(str, device_placement_faults(device_placements))]:
            self._say(line)

    def options(self) -> dict[str, dict[str, Any]]:
        """Megatron's options that the training ranks run with, as a recipe writes them under `train`."""
        (found,) = self._cluster.call_all(self.trainers.workers[:1], "options")
        return found

    def put(self, groups: Sequence[SampleGroup]) -> list[Ref]:
        """Place groups that no engine made where the training ranks can fetch them."""
        return [self._cluster.put(group) for group in groups]

    def fetch(self, rollout: RolloutBatch) -> list[SampleGroup]:
        """The groups themselves, which are then in this process too, with the rewards that the rollout says."""
        groups = self._cluster.gather(dict.fromkeys(rollout.refs, "samples"))
        return [replace(one, rewards_G=of.rewards_G) for one, of in zip(groups, rollout.summaries, strict=True)]

    def publish(self) -> Stats:
        """Move the trained weights into the engines, in place, and leave the GPUs' memory to them.

        An exchange that fails is tried once more while every process is alive: it writes everything anew, and between
        the two the engines refuse to sample. Raises WorkerFailed when that fails too or a process is gone, and
        RuntimeError if an engine then states another version than the trainer's.
        """
        if self.memory.phase != "rollout":
            self.memory.hand_over("reshard")
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
        self.memory.hand_over("rollout")
        return collect_stats(self._store, self._run_id, self.attempts, self._roles.num_members)

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

    def resume(self, folder: Path, version: int, attempts: int) -> None:
        """Load a checkpoint whose weights' last publication was `version`: the next is the one after it."""
        if self.critic:
            self.memory.hand_over("critic")
            self.critic.load(folder / CRITIC)
        self.memory.hand_over("train")
        self.trainers.load(folder)
        self.version, self.attempts = version, attempts
        if (folder / CARRIED).exists():
            groups = open_samples(folder / CARRIED).groups(1)
            self.carried = RolloutBatch([summary(group) for group in groups], self.put(groups))

    def save(self, folder: Path) -> None:
        """Begin a checkpoint after a step's updates; who is saved last has the memory then.

        The policy's files are waited for before the critic's are begun, unless checkpoints are asynchronous.
        """
        self._digests = {}
        self.memory.hand_over("train")
        self.trainers.save(folder)
        if self.carried.refs:
            vocab_size, temperature = self._roles.policy.shape.vocab_size, self._recipe.rollout.temperature
            with writing(folder / CARRIED, vocab_size, temperature) as file:
                file.write(self.fetch(self.carried))
        if self.critic:
            if not self._recipe.checkpoint.asynchronous:
                self._digests = self.trainers.finish_save()  # a host may have no room for the copies of both
            self.memory.hand_over("critic")
            (folder / CRITIC).mkdir()
            self.critic.save(folder / CRITIC)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until all files are written; their digests, as far as the ranks took them."""
        found = self._digests or self.trainers.finish_save()
        of_critic = self.critic.finish_save() if self.critic else {}
        return found | {f"{CRITIC}/{name}": digest for name, digest in of_critic.items()}

    def shutdown(self) -> None:
        """End the engines in their own way; the cluster ends every process that is left."""
        self.engines.shutdown()

    def _open_sessions(self) -> Sessions:
        handles = self.trainers.publish()
        return sessions(
            [one.source for one in handles],
            meet=address_of(self._store),
            run_id=self._run_id,
            shape=self._roles.policy.shape,
            train=self._roles.policy.layout,
            engine=self._roles.engines,
            transformer_engine=handles[0].transformer_engine,
            dtype=self._recipe.model.dtype,
            round_bytes=self._recipe.reshard.round_bytes,
            timeout_s=self._recipe.run.timeout_s,
            gpus_per_node=self._recipe.placement.gpus_per_node,
            verify=self._recipe.reshard.verify,
        )
