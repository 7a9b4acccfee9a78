"""The training ranks and the engines of a run, as the controller sees them: every method is one fan-out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.checkpoints.quantised import fp8_checkpoint
from megarl.checkpoints.snapshots import Digest
from megarl.cluster.actor import Ref
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.cluster.topology import placement_errors, placement_lines
from megarl.config import Recipe
from megarl.device import address_of, host_store
from megarl.disk import while_answering
from megarl.fleet.engines import Engines
from megarl.fleet.expert_placement import ExpertPlacement
from megarl.fleet.memory import MemoryScheduler
from megarl.fleet.rank_groups import (
    AuxiliaryRanks,
    GroupBuffer,
    PolicyRanks,
    RankGroup,
    RewardModelRanks,
    RolloutBatch,
)
from megarl.placement.roles import Phase, Roles, resolve, sent_lora, trains_merged
from megarl.printable import Say
from megarl.recovery.engine_processes import EngineProcess
from megarl.recovery.suspicion import Suspicion
from megarl.resharding import peer_copy
from megarl.resharding.member import Stats, abandon, collect_stats, exchange_suspects
from megarl.resharding.payloads import PayloadName, ReshardStep, exchanged, reshard_steps
from megarl.resharding.peer_copy import PeerCopy, copy_messages
from megarl.resharding.session import Session, Sessions, sessions
from megarl.samples.buffer import PartialGroup, Summary
from megarl.samples.parquet import open_samples, writing
from megarl.samples.summaries import partial_summary, summary
from megarl.types import Metrics, SampleGroup

_MOST_SOURCES = 4  # engines that send their weights to one that is started anew
CRITIC = "critic"  # the folder of the critic's files in a checkpoint


class TrainingFleet:
    """The ranks of policy and critic. Without engines they keep their memory in every phase.

    `version` counts the publications of the weights, from 0; -1 before the first.
    """

    def __init__(
        self, cluster: Cluster, roles: Roles, trainers: PolicyRanks, critic: AuxiliaryRanks | None
    ) -> None:
        self._cluster = cluster
        self.roles = roles
        self.trainers = trainers
        self.critic = critic
        self.version = -1

    def onload_for(self, phase: Phase) -> Metrics:
        """Give the GPUs' memory to the models that compute in `phase`; the readings of it before and after."""
        return {}

    def options(self) -> dict[str, dict[str, Any]]:
        """Megatron's options that the training ranks run with, as a recipe writes them under `train`."""
        (options,) = self._cluster.call_all(self.trainers.workers[:1], "options")
        return options

    def put(self, groups: Sequence[SampleGroup]) -> RolloutBatch:
        """Groups that no engine made, placed where the training ranks can fetch them."""
        column = self.roles.recipe.reward.source
        summaries = [summary(group, column) for group in groups]
        return RolloutBatch(summaries, [*map(self._cluster.put, groups)])


def training_fleet(cluster: Cluster, roles: Roles) -> TrainingFleet:
    """The training ranks of a run without engines, on the first `roles.num_training_slots` slots."""
    critic = _critic(cluster, roles)
    trainers = PolicyRanks(cluster, roles.policy, frozenset())
    cluster.gather(trainers.started | (critic.started if critic else {}))
    share_weights(trainers, critic)
    return TrainingFleet(cluster, roles, trainers, critic)


def _critic(
    cluster: Cluster, roles: Roles, shared: frozenset[int] = frozenset()
) -> AuxiliaryRanks | None:
    if roles.critic is None:
        return None
    return AuxiliaryRanks(cluster, roles.critic, shared)


class Fleet(TrainingFleet):
    """All models of a run on their GPUs.

    Engines start at the same time as the ranks, or after them where engines measure the memory that ranks leave free.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe, say: Say, *, learns: bool = True) -> None:
        """say: prints a line for the user. learns: False where the run only samples: then there is no critic."""
        self._recipe = recipe
        self.say = say
        roles = resolve(recipe, learns=learns)
        shared = roles.shared_slots
        self._run_id = secrets.token_hex(8)
        trainers = PolicyRanks(cluster, roles.policy, shared)
        # through which the members of an exchange find each other; ranks may be rebuilt, and meet elsewhere
        self._store = host_store(recipe.run.timeout_s, cluster.host)
        self.engines = Engines(cluster, recipe, roles.engines, shared, say)
        super().__init__(cluster, roles, trainers, _critic(cluster, roles, shared))
        self.reward_model = None
        if roles.reward_model:
            self.reward_model = RewardModelRanks(cluster, roles.reward_model, shared)
        self._start()
        if recipe.placement.node_gpus:
            self._say_device_placements()
        if taken := max(cluster.call_all(self.trainers.workers, "communicator_bytes"), default=0):
            say(
                f"each of NCCL's groups takes {taken} bytes of a training GPU: communicator_bytes of a hardware file"
            )
        self.memory = MemoryScheduler(self.trainers, self.engines, self.critic, self.reward_model)
        # to publish; more than there are versions once an exchange had to be repeated
        self.attempts = 0
        self._sessions: Sessions
        # engines, up to the last `take_engine_losses`
        self._num_lost = 0
        # the last one into each engine, by its index
        self._copies: dict[int, PeerCopy] = {}
        self.engines.processes.weights = self
        # None where no routes are known, or each rank has all experts
        self._experts = ExpertPlacement.of(recipe, roles)

    def _start(self) -> None:
        """Wait until all processes are built; then the memory is as in the `rollout` phase."""
        groups = [ranks for ranks in (self.trainers, self.critic, self.reward_model) if ranks]
        engines_last = self.engines.measures_shared_memory
        processes = self.engines.processes
        starting = {} if engines_last else processes.start()
        for ranks in groups:
            starting |= ranks.started
        self._cluster.gather(starting)
        share_weights(self.trainers, self.critic, self.reward_model)
        for ranks in groups:
            ranks.offload()  # ranks are built onloaded: from here on the memory scheduler decides
        if engines_last:
            self._cluster.gather(processes.start())
        processes.started()

    def _say_device_placements(self) -> None:
        """Print the GPU and the network cards of each training rank, and the placements that slow the network down."""
        placements = self._cluster.placements(self.trainers.workers, self._recipe.placement)
        for line in [*placement_lines(placements), *map(str, placement_errors(placements))]:
            self.say(line)

    def onload_for(self, phase: Phase) -> Metrics:
        """Give the GPUs' memory to the models that compute in `phase`; the readings of it before and after."""
        return self.memory.onload_for(phase)

    def set_engines(self, count: int) -> int:
        """Between two steps: begin to start engines, or end some, until there are so many, as far as there are GPUs.

        Engines must share no GPU with other models. Those there are then, whose number is returned, are the members of
        the next reshard.
        """
        before = self.roles.engines
        num_slots = self._cluster.extend_slots(before.first + count * before.tp)
        after = replace(before, count=min(count, (num_slots - before.first) // before.tp))
        if after.count > before.count:
            self.engines.processes.add(range(before.end, after.end, before.tp))
        elif after.count < before.count:
            self.engines.processes.remove(before.count - after.count)
        self._cluster.shrink_slots(after.end)
        self.roles = replace(self.roles, engines=after)
        return after.count

    def fetch(self, rollout: RolloutBatch) -> list[SampleGroup]:
        """The groups themselves, copied to this process, with the rewards of their summaries."""
        groups = self._cluster.gather(dict.fromkeys(rollout.refs, "samples"))
        return [
            replace(group, rewards_G=scored.rewards_G)
            for group, scored in zip(groups, rollout.summaries, strict=True)
        ]

    def reshard(self) -> tuple[Stats, Metrics]:
        """Move the trained weights, or adapters, into the engines, in place, and leave the GPUs' memory to them.

        Returns the cost of the exchange, and the memory's readings. Engines that were lost are started first. An
        exchange that fails is repeated, see `_publish`. Raises RuntimeError if an engine then states another version
        than the trainer's.
        """
        readings = {}
        if self.memory.phase != "rollout":
            readings = self.onload_for("reshard")
        version = self.version + 1
        kept_share = None
        if trains_merged(self.roles.policy.recipe):
            kept_share = self.trainers.round_weights(version)
        if self._experts:
            readings |= self._experts.place_by_load(self.engines.take_expert_load())
        payloads = self._publish(version)
        readings |= self.onload_for("rollout")
        # now, or a reshard that is repeated because a rank was lost in these lines would be of another version
        self.version = version
        readings["reshard/engines"] = len(self.engines.processes.engines)
        stats = self._stats(payloads)
        if kept_share is not None:
            stats = replace(stats, kept_share=kept_share)
        return stats, readings

    def take_engine_losses(self) -> int:
        """How many engines were lost since the last call."""
        num_lost = self.engines.processes.num_lost
        since_last = num_lost - self._num_lost
        self._num_lost = num_lost
        return since_last

    def _stats(self, payloads: Sequence[PayloadName]) -> Stats:
        """The cost of the last publication."""
        return collect_stats(
            self._store, self._run_id, self.attempts, self.roles.num_members, payloads
        )

    def begin_copy(self, target: EngineProcess, sources: Sequence[EngineProcess]) -> dict[Ref, str]:
        """Begin to copy the weights of other engines into one; the target's calls, by worker."""
        self.attempts += 1
        copy = PeerCopy(
            meet=address_of(self._store),
            run_id=self._run_id,
            attempt=self.attempts,
            version=self.version,
            target=target.index,
            sources=tuple(source.index for source in sources[:_MOST_SOURCES]),
            layout=self.roles.engines,
            verify=self._recipe.reshard.verify,
            round_bytes=self._recipe.reshard.round_bytes,
            timeout_s=self._recipe.run.timeout_s,
        )
        self._copies[target.index] = copy
        of_sources, of_target = copy_messages(copy)
        for source in sources[:_MOST_SOURCES]:
            # a source that fails has told the target
            source.worker.call("send_copy", of_sources[source.index])
        if self._experts:
            of_target = {**of_target, "places": self._experts.places}
        call = target.worker.call("receive_copy", of_target, self.version)
        return {call: target.worker.name}

    def abandon_copies(self, engine: EngineProcess, reason: str) -> None:
        """An engine is lost: fail the copies that it took part in."""
        for target, copy in [*self._copies.items()]:
            if engine.index in copy.engines:
                del self._copies[target]
                peer_copy.abandon(copy, engine.index, reason)

    def publish_again(self) -> None:
        """Fill all engines with the version that those had which are lost; the ranks hold its weights still."""
        self._publish(self.version)

    def _publish(self, version: int) -> list[PayloadName]:
        """Exchange weights until all engines have this version; what was exchanged.

        An exchange that fails is tried once more while every process is alive, and again after an engine was lost and
        started anew: it writes everything anew, through new connections of the engines, and between the two these
        refuse to sample. Where that fails, too, the engine is lost that is to blame, see `Suspicion`: each at most
        once. Raises WorkerFailed when a training rank is to blame, or gone, or nobody is left to blame.
        """
        processes = self.engines.processes
        suspicion = Suspicion(self.roles.engines)
        is_repeated = False
        while True:
            self._refuse_lost_ranks()
            processes.restore()
            if not all(engine.has_session for engine in processes.engines):
                # a handle to a rank's parameters is for one process that maps them
                self._sessions = self._open_sessions()
            steps = self._steps()
            num_lost = processes.num_lost
            calls = self._exchange(version, steps)
            try:
                self._cluster.gather(calls)
                self._refuse_lost_ranks()
                break
            except WorkerFailed as failure:
                abandon(self._store, self._run_id, self.attempts, exchanged(steps), str(failure))
                if not self._cluster.settle(calls):
                    raise
                self._refuse_lost_ranks()
                if processes.num_lost == num_lost:
                    suspicion.note(self._suspects(steps, failure))
                    if is_repeated:
                        self._give_up(suspicion, failure)
                    is_repeated = True
                # a member keeps its connection to the store with its session, and one that is broken stays so
                processes.forget_sessions()
                self.say(f"the reshard to version {version} failed and is repeated: {failure}")
        processes.filled()
        versions = self.engines.versions()
        if {*versions} - {version}:
            raise RuntimeError(
                f"the engines are at versions {versions}, the trainer is at {version}"
            )
        return exchanged(steps)

    def _suspects(self, steps: Sequence[ReshardStep], failure: WorkerFailed) -> list[int]:
        """The members by which the last attempt may have failed; failure: that of its first call.

        Where no member suspects any it is the worker of the call, since it failed before it knew any other. Where the
        members' inputs differ it is nobody: they would differ again.
        """
        num_members = self.roles.num_members
        payloads = exchanged(steps)
        suspects = exchange_suspects(
            self._store, self._run_id, self.attempts, num_members, payloads
        )
        if suspects == []:
            names = map(self._member_name, range(num_members))
            return [member for member, name in enumerate(names) if name == failure.worker]
        return suspects or []

    def _member_name(self, member: int) -> str:
        """Of the worker that is called for a member of the exchange."""
        if place := self.roles.engines.member(member):
            return self.engines.processes.engines[place[0]].worker.name
        return self.trainers.workers[member].name

    def _give_up(self, suspicion: Suspicion, failure: WorkerFailed) -> None:
        """Lose the engine by which exchanges fail; raises WorkerFailed where that is a training rank.

        Raises failure, the one of the latest attempt, where nobody is left to give up.
        """
        member = suspicion.give_up()
        if member is None:
            raise failure
        name = self._member_name(member)
        if name != failure.worker:
            problem = f"{name}: exchanges of weights fail by it ({failure})"
            failure = WorkerFailed(problem, failure.evidence, name)
        if not self.engines.processes.lose_named(failure):
            raise failure

    def _refuse_lost_ranks(self) -> None:
        """Raises WorkerFailed where the ranks whose weights are read are gone."""
        if loss := self.trainers.processes.loss:
            raise loss.cause

    def _steps(self) -> list[ReshardStep]:
        policy = self.roles.policy
        from_files = fp8_checkpoint(policy.recipe, policy.model) is not None
        engines = self.engines.processes.engines
        have_weights = all(engine.has_session for engine in engines)
        return reshard_steps(policy.lora, has_weights=have_weights, from_files=from_files)

    def _exchange(self, version: int, steps: Sequence[ReshardStep]) -> dict[Ref, str]:
        """Call every member of one attempt. Engines keep their session from the first exchange that succeeded."""
        self.attempts += 1
        calls: dict[Ref, str] = {}
        places = self._experts.places if self._experts else None
        for engine in self.engines.processes.engines:
            message = self._sessions.engine_message(
                engine.index, version, self.attempts, not engine.has_session, steps, places
            )
            worker = engine.worker
            calls[worker.call("reshard", message, version)] = worker.name
        for rank, session in self._sessions.trainers.items():
            worker = self.trainers.workers[rank]
            calls[worker.call("reshard", session, version, self.attempts, steps, places)] = (
                worker.name
            )
        return calls

    def load(self, folder: Path) -> None:
        """Load a checkpoint into the ranks; then the memory is the policy's."""
        if self.critic:
            self.onload_for("critic")
            self.critic.load(folder / CRITIC)
        self.onload_for("train")
        self.trainers.load(folder)

    def resume(self, folder: Path, version: int, attempts: int) -> list[tuple[str, Summary, Ref]]:
        """Load a checkpoint whose weights were published last as `version`.

        Returns the groups of its buffer, each with its prompt's id.
        """
        self.load(folder)
        self.version = version
        # attempts are counted on where the run goes back: none may have the number of an earlier one
        self.attempts = max(self.attempts, attempts)
        if not buffer_file(folder).exists():
            return []
        groups = open_samples(buffer_file(folder)).buffered_groups()
        column = self._recipe.reward.source
        return [
            (group.prompt.id, _summary(group, column), self._cluster.put(group)) for group in groups
        ]

    def save(self, folder: Path, buffer: GroupBuffer) -> tuple[dict[str, Digest], Metrics]:
        """Begin a checkpoint after a step's updates; the model that is saved last then holds the memory.

        Returns the digests of the policy's files if these are already written, for `finish_save`, and the memory's
        readings. The policy's files are waited for before the critic's are begun, unless checkpoints are asynchronous:
        a host may have no room for the copies of both.
        """
        digests = {}
        readings = self.onload_for("train")
        self.trainers.save(folder)
        if buffer.entries:
            self._on_disk(partial(self._save_buffer, folder, buffer), folder)
        if self.critic:
            if not self._recipe.checkpoint.asynchronous:
                digests = self.trainers.finish_save()
            readings |= self.onload_for("critic")
            self._on_disk((folder / CRITIC).mkdir, folder)
            self.critic.save(folder / CRITIC)
        return digests, readings

    def _save_buffer(self, folder: Path, buffer: GroupBuffer) -> None:
        vocab_size = self.roles.policy.shape.vocab_size
        temperature = self._recipe.rollout.temperature
        with writing(buffer_file(folder), vocab_size, temperature) as file:
            for entry in buffer.entries:
                if entry.ref is not None:
                    file.write(self._cluster.gather({entry.ref: "samples"}))

    def _on_disk(self, function: Callable[[], None], folder: Path) -> None:
        """Work in a checkpoint's folder. Raises Silence where its disk does not answer."""
        while_answering(function, folder, "a checkpoint", self._recipe.run.timeout_s)

    def has_saved(self) -> bool:
        """Whether all files of the checkpoint that was begun are written, so that `finish_save` waits for none."""
        return self.trainers.has_saved() and (self.critic is None or self.critic.has_saved())

    def finish_save(self, digests: dict[str, Digest]) -> dict[str, Digest]:
        """Wait until all files are written; the digests that the ranks took of them. digests: as `save` returned."""
        all_digests = dict(digests or self.trainers.finish_save())
        if self.critic:
            for name, digest in self.critic.finish_save().items():
                all_digests[f"{CRITIC}/{name}"] = digest
        return all_digests

    def shutdown(self) -> None:
        """End the engines in their own way; the cluster ends every process that is left."""
        self.engines.shutdown()

    def _open_sessions(self) -> Sessions:
        published = self.trainers.handles()
        common = Session(
            meet=address_of(self._store),
            run_id=self._run_id,
            shape=self.roles.policy.shape,
            train=self.roles.policy.layout,
            engine=self.roles.engines,
            transformer_engine=published[0].transformer_engine,
            dtype=self._recipe.model.dtype,
            round_bytes=self._recipe.reshard.round_bytes,
            timeout_s=self._recipe.run.timeout_s,
            gpus_per_node=self._recipe.placement.gpus_per_node,
            verify=self._recipe.reshard.verify,
            fp8_checkpoint=fp8_checkpoint(self.roles.policy.recipe, self.roles.policy.model),
            lora=sent_lora(self._recipe, self.roles.policy.shape),
        )
        return sessions(common, [rank.source for rank in published])


def share_weights(trainers: PolicyRanks, *others: RankGroup | None) -> None:
    """Have models without frozen weights of their own compute with the policy's."""
    for ranks in others:
        if ranks and ranks.shares_weights:
            ranks.share(trainers.handles())  # handles are for one process that maps them


def _summary(group: SampleGroup | PartialGroup, source_column: str) -> Summary:
    if isinstance(group, PartialGroup):
        return partial_summary(group)
    return summary(group, source_column)


def buffer_file(folder: Path) -> Path:
    """The file of the buffer's groups in a checkpoint, a row group each; earlier versions named it stock.parquet."""
    earlier = folder / "stock.parquet"
    if earlier.exists():
        return earlier
    return folder / "buffer.parquet"
