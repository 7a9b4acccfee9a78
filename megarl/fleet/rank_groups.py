"""Groups of training ranks as the controller sees them: the policy's, the critic's and the reward model's."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl import device
from megarl.algos import ALGORITHMS, AUXILIARY_AGGREGATION, hyperparameters_of
from megarl.checkpoints.snapshots import Digest
from megarl.cluster.actor import Ref
from megarl.cluster.session import Cluster
from megarl.config import Recipe
from megarl.parallel.placement import is_reporting_rank
from megarl.parallel.roles import Role, resolve
from megarl.training.batching import SampleRef, Update, key_of, plan_updates
from megarl.training.flops import speed, train_work
from megarl.training.policy import PublishedRank
from megarl.types import GroupSummary, Hyperparameters, Metrics, UserFault

# Of the model beside the policy, by what it says of tokens: its rank's class, and what people call it.
_TARGETS = {
    "values": "megarl.training.critic:CriticRank",
    "process_rewards": "megarl.training.implicit_reward:ImplicitRewardRank",
}
_NAMES = {"values": "critic", "process_rewards": "implicit reward model"}


@dataclass(frozen=True)
class RolloutBatch:
    """Groups as the controller holds them: summaries here, samples in the object store; index i is the same group."""

    summaries: list[GroupSummary]
    refs: list[Ref]


class RankGroup:
    """All ranks of one Megatron world; rank r is on GPU slot first + r. Those on `shared` slots give their memory."""

    def __init__(
        self,
        cluster: Cluster,
        role: Role,
        shared: frozenset[int],
        *,
        name: str,
        target: str,
        more: Sequence[object] = (),
    ) -> None:
        """name: of a rank, for people; target and more: its class, and what it is told."""
        recipe, slots = role.recipe, role.slots
        self._cluster, self._recipe, self._shape, self._layout = cluster, recipe, role.shape, role.layout
        # They meet there: served as long as this object lives.
        self.store = device.host_store(recipe.run.timeout_s, cluster.host)
        self.workers = [cluster.worker(f"{name} {rank}", slot) for rank, slot in enumerate(slots)]
        self.started = {
            worker.start(target, rank, recipe, device.address_of(self.store), *more): worker.name
            for rank, worker in enumerate(self.workers)
        }
        self._lenders = [worker for worker, slot in zip(self.workers, slots, strict=True) if slot in shared]
        self._pieces: list[list[Ref]] = []

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
        """Wait until all files are written; their digests, as far as the ranks took them.

        Whatever has become of other processes: a run that fails saves what it has begun.
        """
        calls, found = {worker.call("finish_save"): worker.name for worker in self.workers}, {}
        for of_rank in self._cluster.gather(calls, among=self.workers):
            found |= of_rank
        return found

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def pieces(self, dp: int) -> list[Ref]:
        """What was said, when the ranks were asked last, to the readers' data-parallel rank `dp`."""
        return [parts[dp] for parts in self._pieces]

    def _ask(
        self, method: str, updates: Sequence[Update], refs: Sequence[Ref], readers: Sequence[Update], *first: object
    ) -> None:
        """Have each rank say something of its share's tokens, in pieces for those whose plan `readers` is."""
        count = len(readers[0].micro_batches)
        wanted = self._cluster.put([_keys(_share(readers, at)) for at in range(count)])
        dealt = self._dealt(updates, refs)
        self._pieces, calls = [], {}
        for rank, worker in enumerate(self.workers):
            share, samples = dealt[self._layout.coords(rank).dp]
            if not is_reporting_rank(self._layout, rank):
                calls[worker.call(method, *first, share, wanted, samples)] = worker.name
                continue
            parts = worker.call_many(count, method, *first, share, wanted, samples)
            calls |= dict.fromkeys(parts, worker.name)
            self._pieces.append(parts)
        self._cluster.await_all(calls)

    def _dealt(self, updates: Sequence[Update], refs: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        """Of each data-parallel rank the updates and their samples, once for all ranks that have the same.

        The first of these fetches the groups; what it passes on has no sample that others train on.
        """
        found, first = [], self._layout.tp * self._layout.cp  # Megatron's order: then the next data-parallel rank's
        for dp, worker in enumerate(self.workers[: self._layout.dp * first : first]):
            share = _share(updates, dp)
            needed, shared = _groups(share), self._cluster.put(share)
            of_groups = [refs[group] for group in needed]
            found.append((shared, worker.together("megarl.training.batching:own_samples", shared, needed, *of_groups)))
        return found

    def plan(self, samples: Sequence[SampleRef], rules: Hyperparameters) -> list[Update]:
        """The step's updates; the micro-batches of each by data-parallel rank.

        Where rules leave samples out, as many updates fewer as there are samples fewer than asked for.
        """
        train, rollout, updates = self._recipe.train, self._recipe.rollout, self._recipe.train.updates_per_step
        if rules.dynamic_sampling or rules.overlong_filter:
            share = len(samples) / (rollout.prompts_per_step * rollout.samples_per_prompt)
            updates = min(updates, math.ceil(updates * share))
        return plan_updates(
            samples,
            updates=min(updates, len(samples)),  # verdicts that failed may leave fewer samples too
            dp=self._layout.dp,
            token_budget=train.tokens_per_micro_batch,
            aggregation=rules.aggregation,
            longest_response=rollout.max_response_tokens,
            work=train_work(self._shape),
            align=self._layout.tokens_align,
            multiple=self._layout.pp if self._layout.vpp > 1 else 1,  # as an interleaved pipeline takes them
        )

    def _call(self, method: str, *args: object) -> None:
        self._cluster.gather({worker.call(method, *args): worker.name for worker in self.workers})

    def _merged(self, calls: dict[Ref, str]) -> list[Metrics]:
        """The metrics of each update, of which every rank says a part."""
        merged: list[Metrics] = []
        for of_rank in self._cluster.gather(calls):
            merged = merged or [{} for _ in of_rank]
            for metrics, more in zip(merged, of_rank, strict=True):
                metrics |= more
        return merged


class TrainingRanks(RankGroup):
    """The policy's."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        super().__init__(cluster, role, shared, name="training rank", target="megarl.training.policy:PolicyRank")
        self._speed: Metrics = {}

    def load_weights(self, folder: Path) -> None:
        """The weights alone of a checkpoint, from any layout."""
        self._call("load_weights", folder)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._call("export", folder)

    def publish(self) -> list[PublishedRank]:
        """Each rank's handles to its parameters."""
        return self._cluster.call_all(self.workers, "publish")

    def take_speed(self) -> Metrics:
        """Of the last call of `train`, once; nothing in a step without one."""
        found, self._speed = self._speed, {}
        return found

    def plan_of(self, algorithm: str, samples: Sequence[SampleRef]) -> list[Update]:
        """As `train` has the step."""
        return self.plan(samples, hyperparameters_of(algorithm, self._recipe.algorithm))

    def observe(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        readers: Sequence[Update],
        *,
        keeps: bool,
    ) -> None:
        """Have the samples looked at for the KL penalties of their tokens; readers: the critic's plan.

        keeps: `train` follows, and need not look again.
        """
        self._ask("observe", self.plan_of(algorithm, samples), refs, readers, algorithm, keeps)

    def train(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        lr: float,
        critic: AuxiliaryRanks | None = None,
    ) -> list[Metrics]:
        """All optimizer updates of one step. Each rank gets the samples of its own share, and no others.

        critic: whose values, asked for before, make the advantages. Metrics of each update: the loss's statistics are
        sums, or maxima where the name ends in _max.
        """
        updates, began, calls = self.plan_of(algorithm, samples), time.perf_counter(), {}
        dealt = self._dealt(updates, refs)
        for rank, worker in enumerate(self.workers):
            at = self._layout.coords(rank).dp
            share, own = dealt[at]
            pieces = critic.pieces(at) if critic else []
            calls[worker.call("train", algorithm, share, lr, own, *pieces)] = worker.name
        merged = self._merged(calls)
        lengths, seconds = [one.length for one in samples], time.perf_counter() - began
        self._speed = speed(self._shape, lengths, seconds, self._layout.world_size, device.name())
        return merged


class AuxiliaryRanks(RankGroup):
    """Of the model that learns beside the policy."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        kind = ALGORITHMS[role.recipe.algorithm.name].critic
        name, target = f"{_NAMES[kind]} rank", _TARGETS[kind]
        super().__init__(cluster, role, shared, name=name, target=target, more=[role.first_slot])
        self._aggregation = AUXILIARY_AGGREGATION[kind]

    @property
    def recipe(self) -> Recipe:
        """As these ranks read it."""
        return self._recipe

    def plan_of(self, samples: Sequence[SampleRef]) -> list[Update]:
        """As these ranks have the step."""
        rules = hyperparameters_of(self._recipe.algorithm.name, self._recipe.algorithm)
        return self.plan(samples, replace(rules, aggregation=self._aggregation))

    def values(self, samples: Sequence[SampleRef], refs: Sequence[Ref], readers: Sequence[Update]) -> None:
        """Have every sample's tokens valued, for `pieces` and `train`; readers: the policy's own plan of the step."""
        self._ask("values", self.plan_of(samples), refs, readers)

    def train(self, lr: float, rewards: RankGroup | None) -> list[Metrics]:
        """All optimizer updates of the step on what was valued last; metrics of each, sums as of its loss.

        rewards: ranks that were asked for the tokens' own.
        """
        calls = {}
        for rank, worker in enumerate(self.workers):
            pieces = rewards.pieces(self._layout.coords(rank).dp) if rewards else []
            calls[worker.call("train", lr, *pieces)] = worker.name
        return self._merged(calls)


class RewardRanks(RankGroup):
    """The reward model's."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        target = "megarl.training.reward_model:RewardModelRank"
        super().__init__(cluster, role, shared, name="reward model rank", target=target, more=[role.first_slot])

    def score(self, rollout: RolloutBatch) -> RolloutBatch:
        """The rollout with `reward_model.weight` times each response's score added to its reward.

        Raises UserFault(reward_model.path) for a score that is no finite number.
        """
        dp, count, calls = self._layout.dp, len(rollout.refs), {}
        for rank, worker in enumerate(self.workers):
            own = range(self._layout.coords(rank).dp, count, dp)
            calls[worker.call("score", *(rollout.refs[index] for index in own))] = worker.name
        summaries = list(rollout.summaries)
        for rank, scores in enumerate(self._cluster.gather(calls)):
            own = range(self._layout.coords(rank).dp, count, dp) if scores is not None else ()  # not on this stage
            for index, scores_G in zip(own, scores or (), strict=True):
                if not np.isfinite(scores_G).all():
                    asked = rollout.summaries[index].prompt_text
                    problem, mend = f"scores {scores_G} in answer to {asked!r}", "use another model, or model.dtype"
                    raise UserFault("reward_model.path", problem, mend)
                rewards_G = rollout.summaries[index].rewards_G + self._recipe.reward_model.weight * scores_G
                summaries[index] = replace(rollout.summaries[index], rewards_G=rewards_G.astype(np.float32))
        return RolloutBatch(summaries, rollout.refs)


def trainers_alone(cluster: Cluster, recipe: Recipe) -> TrainingRanks:
    """The policy's ranks and no others: they keep their memory in every phase."""
    ranks = TrainingRanks(cluster, resolve(recipe).policy, frozenset())
    cluster.gather(ranks.started)
    return ranks


def ranks_alone(cluster: Cluster, recipe: Recipe) -> tuple[TrainingRanks, AuxiliaryRanks | None]:
    """What trains in a run without engines, on the first `gpus_alone` slots; all keep their memory in every phase."""
    roles = resolve(recipe)
    critic = AuxiliaryRanks(cluster, roles.critic, frozenset()) if roles.critic else None
    trainers = TrainingRanks(cluster, roles.policy, frozenset())
    cluster.gather(trainers.started | (critic.started if critic else {}))
    return trainers, critic


def gpus_alone(recipe: Recipe) -> int:
    """Slots that a run without engines needs."""
    roles = resolve(recipe)
    return max(role.slots.stop for role in (roles.policy, roles.critic) if role)


def _share(updates: Sequence[Update], dp_rank: int) -> list[Update]:
    """One data-parallel rank's part of each update."""
    return [replace(update, micro_batches=(update.micro_batches[dp_rank],)) for update in updates]


def _groups(share: Sequence[Update]) -> list[int]:
    """The groups whose samples are in a share, rising."""
    return sorted({one.group for update in share for batch in update.micro_batches[0] for one in batch})


def _keys(share: Sequence[Update]) -> frozenset[tuple[int, int]]:
    return frozenset(key_of(one) for update in share for batch in update.micro_batches[0] for one in batch)
