"""Groups of training ranks as the controller sees them: the policy's, the critic's and the reward model's."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from megarl import device
from megarl.algos import ALGORITHMS, AUXILIARY_MODELS, hyperparameters_of
from megarl.algos.statistics import Statistics
from megarl.checkpoints.snapshots import Digest
from megarl.cluster.actor import Ref
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.placement.roles import Role, is_reporting_rank
from megarl.resharding.session import PublishedRank
from megarl.samples.buffer import Entry, RolloutBuffer
from megarl.training.batching import SampleRef, Update, by_sample, key_of, plan_updates, refs_of
from megarl.training.flops import speed, train_work
from megarl.types import GroupSummary, Hyperparameters, Metrics, UserError

GroupBuffer = RolloutBuffer[Ref]


@dataclass(frozen=True)
class RolloutBatch:
    """Groups as the controller holds them: summaries here, samples in the object store; index i is the same group."""

    summaries: list[GroupSummary]
    refs: list[Ref]

    @staticmethod
    def of(entries: Sequence[Entry[Ref]]) -> RolloutBatch:
        """The complete groups of a stock's entries."""
        complete = [
            (one.summary, one.ref) for one in entries if isinstance(one.summary, GroupSummary)
        ]
        return RolloutBatch(
            [summary for summary, _ in complete], [ref for _, ref in complete if ref is not None]
        )


@dataclass(frozen=True)
class PerTokenResults:
    """References to what the ranks of one model computed for the tokens of a step.

    The policy's ranks compute KL penalties, an auxiliary model's values or process rewards. Ranks that hold the same
    samples compute the same, and one of them reports.

    shares: (updates, their samples) of each data-parallel rank. states: of each rank, results that its own next call
    reuses. token_values: of each reporting rank, one reference for each data-parallel rank of the readers.
    """

    shares: list[tuple[Ref, Ref]]
    states: list[Ref]
    token_values: list[list[Ref]]

    def of(self, dp: int) -> list[Ref]:
        """The token values of the readers' data-parallel rank `dp`."""
        return [parts[dp] for parts in self.token_values]

    def for_readers(self) -> PerTokenResults:
        """Without the samples and states of the ranks' own next call, once it is done: the object store frees them."""
        return replace(self, shares=[], states=[])


@dataclass(frozen=True)
class Trained:
    """Statistics of each update, and the speed of all."""

    updates: list[Statistics]
    speed: Metrics


class RankGroup:
    """All ranks of one Megatron world; rank r is on GPU slot first + r. Ranks on `shared` slots hand over memory."""

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
        """name: of a rank, for people. target: its class; more: its last arguments."""
        recipe = role.recipe
        slots = role.slots
        self.shares_weights = role.shares_weights
        self._cluster = cluster
        self._recipe = recipe
        self._shape = role.shape
        self._layout = role.layout
        # Where the ranks meet: served as long as this object lives.
        self.store = device.host_store(recipe.run.timeout_s, cluster.host)
        self.workers = [cluster.worker(f"{name} {rank}", slot) for rank, slot in enumerate(slots)]
        self.started = {
            worker.start(target, rank, recipe, device.address_of(self.store), *more): worker.name
            for rank, worker in enumerate(self.workers)
        }
        self._sharing = [
            worker for worker, slot in zip(self.workers, slots, strict=True) if slot in shared
        ]

    def onload(self) -> None:
        self._cluster.call_all(self._sharing, "onload")

    def offload(self) -> None:
        self._cluster.call_all(self._sharing, "offload")

    def held_bytes(self) -> int:
        """Memory of the rank on a shared slot that holds most; 0 where none is shared."""
        return max(self._cluster.call_all(self._sharing, "held_bytes"), default=0)

    def share(self, published: Sequence[PublishedRank]) -> None:
        """Have each rank compute with the frozen weights of the policy's rank on its slot."""
        pairs = zip(self.workers, published, strict=True)
        self._cluster.gather(
            {worker.call("share", one.source): worker.name for worker, one in pairs}
        )

    def save(self, folder: Path) -> None:
        """Begin a checkpoint: what is to be written is copied when this returns."""
        self._call("save", folder)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until all files are written; their digests, as far as the ranks took them.

        Whatever has become of other processes: a run that fails saves what it has begun.
        """
        calls = {worker.call("finish_save"): worker.name for worker in self.workers}
        found = {}
        for of_rank in self._cluster.gather(calls, among=self.workers):
            found |= of_rank
        return found

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def _per_token(
        self,
        method: str,
        updates: Sequence[Update],
        refs: Sequence[Ref],
        readers: Sequence[Update],
        *first: object,
    ) -> PerTokenResults:
        """Have each rank compute something of its share's tokens; readers: the plan of the ranks that train on it."""
        of_readers = [refs_of(_share(readers, dp)) for dp in range(len(readers[0].micro_batches))]
        wanted = self._cluster.put([frozenset(map(key_of, of_reader)) for of_reader in of_readers])
        found = PerTokenResults(self._assigned(updates, refs), [], [])
        calls = {}
        for rank, worker in enumerate(self.workers):
            share, samples = found.shares[self._layout.coords(rank).dp]
            # Ranks that hold the same return their own state alone: each reference costs the controller time.
            reports = is_reporting_rank(self._layout, rank)
            parts, asked = (len(of_readers), wanted) if reports else (0, ())
            *token_values, state = worker.call_many(
                parts + 1, method, *first, share, asked, samples
            )
            found.states.append(state)
            if reports:
                found.token_values.append(token_values)
            calls |= dict.fromkeys([*token_values, state], worker.name)
        self._cluster.await_all(calls)
        return found

    def _assigned(self, updates: Sequence[Update], refs: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
        """(updates, their samples) of each data-parallel rank, one reference for all ranks with the same samples.

        The first of these ranks fetches the groups, and passes them on without the samples of other shares.
        """
        # Megatron's order: data-parallel ranks are so far apart
        found = []
        first = self._layout.tp * self._layout.cp
        for dp, worker in enumerate(self.workers[: self._layout.dp * first : first]):
            share = _share(updates, dp)
            needed = _groups(share)
            shared = self._cluster.put(share)
            of_groups = [refs[group] for group in needed]
            found.append(
                (
                    shared,
                    worker.bundle(
                        "megarl.training.batching:own_samples", shared, needed, *of_groups
                    ),
                )
            )
        return found

    def plan(self, samples: Sequence[SampleRef], hyperparameters: Hyperparameters) -> list[Update]:
        """The step's updates; the micro-batches of each by data-parallel rank.

        Where an algorithm leaves samples out, there are fewer updates in proportion.
        """
        train = self._recipe.train
        rollout = self._recipe.rollout
        updates = self._recipe.train.updates_per_step
        num_samples = len(by_sample(samples))
        if hyperparameters.dynamic_sampling or hyperparameters.overlong_filter:
            share = num_samples / (rollout.prompts_per_step * rollout.samples_per_prompt)
            updates = min(updates, math.ceil(updates * share))
        return plan_updates(
            samples,
            updates=min(updates, num_samples),  # verdicts that failed may leave fewer samples too
            dp=self._layout.dp,
            token_budget=train.tokens_per_micro_batch,
            aggregation=hyperparameters.aggregation,
            longest_response=self._recipe.longest_sample,
            work=train_work(self._shape),
            align=self._layout.tokens_align,
            multiple=self._layout.batch_multiple,
            bubble_micro_batches=self._layout.bubble_micro_batches,
        )

    def _call(self, method: str, *args: object) -> None:
        self._cluster.gather({worker.call(method, *args): worker.name for worker in self.workers})

    def _train(
        self,
        shares: Sequence[tuple[Ref, Ref]],
        lr: float,
        states: Sequence[Ref | None],
        of_others: PerTokenResults | None,
        *first: object,
    ) -> list[Statistics]:
        """Train all ranks; the statistics of each update.

        of_others: the token values of another model's ranks. first: the call's first arguments.
        """
        calls = {}
        for rank, (worker, state) in enumerate(zip(self.workers, states, strict=True)):
            dp = self._layout.coords(rank).dp
            share, samples = shares[dp]
            values = of_others.of(dp) if of_others else []
            calls[worker.call("train", *first, share, lr, state, samples, *values)] = worker.name
        return self._statistics(calls)

    def _statistics(self, calls: dict[Ref, str]) -> list[Statistics]:
        """The statistics of each update, of which every call returns a part."""
        merged: list[Statistics] = []
        for of_rank in self._cluster.gather(calls):
            merged = merged or [{} for _ in of_rank]
            for metrics, more in zip(merged, of_rank, strict=True):
                metrics |= more
        return merged


class PolicyRanks(RankGroup):
    """The ranks of the policy."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        super().__init__(
            cluster, role, shared, name="training rank", target="megarl.training.policy:PolicyRank"
        )

    def load_weights(self, folder: Path) -> None:
        """The weights alone of a checkpoint, from any layout."""
        self._call("load_weights", folder)

    def export(self, folder: Path, *, fp8: bool = False) -> None:
        """Write the weights as a Hugging Face checkpoint; fp8: those of linear layers in tiles with scales."""
        self._call("export", folder, fp8)

    def round_weights(self, version: int) -> float | None:
        """Round the sums of weights and adapters as engines get this version; the part that rounding has kept."""
        calls = {worker.call("round_weights", version): worker.name for worker in self.workers}
        shares = [one for one in self._cluster.gather(calls) if one is not None]
        return fmean(shares) if shares else None

    def publish(self) -> list[PublishedRank]:
        """Each rank's handles to its parameters."""
        return self._cluster.call_all(self.workers, "publish")

    def plan_of(self, algorithm: str, samples: Sequence[SampleRef]) -> list[Update]:
        """The updates that `train` makes of a step's samples."""
        return self.plan(samples, hyperparameters_of(algorithm, self._recipe.algorithm))

    def observe(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        readers: Sequence[Update],
    ) -> PerTokenResults:
        """KL penalties of the samples' tokens, for the critic and for `train`; readers: the critic's plan."""
        return self._per_token(
            "observe", self.plan_of(algorithm, samples), refs, readers, algorithm
        )

    def train(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        lr: float,
        *,
        token_values: PerTokenResults | None = None,
        observation: PerTokenResults | None = None,
    ) -> Trained:
        """All optimizer updates of one step. Each rank gets the samples of its own share, and no others.

        token_values: of the auxiliary model, for the advantages. observation: of the same samples, if there is one.
        """
        if observation:
            updates = []
        else:
            updates = self.plan_of(algorithm, samples)
        began = time.perf_counter()
        if observation:
            shares = observation.shares
        else:
            shares = self._assigned(updates, refs)
        if observation:
            states = observation.states
        else:
            states = [None] * len(self.workers)
        metrics = self._train(shares, lr, states, token_values, algorithm)
        lengths = [one.length for one in samples]
        seconds = time.perf_counter() - began
        return Trained(
            metrics,
            speed(self._shape, lengths, seconds, self._layout.world_size, device.gpu_name()),
        )


class AuxiliaryRanks(RankGroup):
    """The ranks of the critic or of the implicit reward model."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        kind = ALGORITHMS[role.recipe.algorithm.name].critic
        self._model = AUXILIARY_MODELS[kind]
        name = f"{self._model.name} rank"
        target = "megarl.training.auxiliary:AuxiliaryRank"
        super().__init__(
            cluster, role, shared, name=name, target=target, more=[kind, role.first_slot]
        )

    @property
    def recipe(self) -> Recipe:
        """As these ranks read it."""
        return self._recipe

    def plan_of(self, samples: Sequence[SampleRef]) -> list[Update]:
        """The updates that these ranks make of a step's samples."""
        hyperparameters = hyperparameters_of(self._recipe.algorithm.name, self._recipe.algorithm)
        return self.plan(samples, replace(hyperparameters, aggregation=self._model.aggregation))

    def values(
        self, samples: Sequence[SampleRef], refs: Sequence[Ref], readers: Sequence[Update]
    ) -> PerTokenResults:
        """Values of the samples' tokens, for the policy and for `train`; readers: the policy's plan."""
        return self._per_token("values", self.plan_of(samples), refs, readers)

    def train(
        self, token_values: PerTokenResults, lr: float, observation: PerTokenResults | None = None
    ) -> list[Statistics]:
        """All optimizer updates of the step on the samples of these values; statistics of each.

        observation: with the KL penalties of the samples' tokens, where the algorithm pays them in the reward.
        """
        return self._train(token_values.shares, lr, token_values.states, observation)


class RewardModelRanks(RankGroup):
    """The ranks of the reward model."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        target = "megarl.training.reward_model:RewardModelRank"
        super().__init__(
            cluster, role, shared, name="reward model rank", target=target, more=[role.first_slot]
        )

    def score(self, rollout: RolloutBatch) -> RolloutBatch:
        """The rollout with `reward_model.weight` times each response's score added to its reward.

        Raises UserError(reward_model.path) for a score that is no finite number.
        """
        dp = self._layout.dp
        count = len(rollout.refs)
        calls = {}
        for rank, worker in enumerate(self.workers):
            own = range(self._layout.coords(rank).dp, count, dp)
            calls[worker.call("score", *(rollout.refs[index] for index in own))] = worker.name
        summaries = list(rollout.summaries)
        for rank, scores in enumerate(self._cluster.gather(calls)):
            # not on this stage
            if scores is not None:
                own = range(self._layout.coords(rank).dp, count, dp)
            else:
                own = ()
            for index, scores_G in zip(own, scores or (), strict=True):
                if not np.isfinite(scores_G).all():
                    asked = rollout.summaries[index].prompt_text
                    problem = f"scores {scores_G} in answer to {asked!r}"
                    hint = "use another model, or model.dtype"
                    raise UserError("reward_model.path", problem, hint)
                rewards_G = (
                    rollout.summaries[index].rewards_G + self._recipe.reward_model.weight * scores_G
                )
                summaries[index] = replace(
                    rollout.summaries[index], rewards_G=rewards_G.astype(np.float32)
                )
        return RolloutBatch(summaries, rollout.refs)


def _share(updates: Sequence[Update], dp_rank: int) -> list[Update]:
    """One data-parallel rank's part of each update."""
    return [replace(update, micro_batches=(update.micro_batches[dp_rank],)) for update in updates]


def _groups(share: Sequence[Update]) -> list[int]:
    """The groups whose samples are in a share, in ascending order."""
    return sorted({ref.group for ref in refs_of(share)})
