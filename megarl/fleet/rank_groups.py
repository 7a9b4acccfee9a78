"""Groups of training ranks as the controller sees them: the policy's, the critic's and the reward model's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from megarl import device
from megarl.algos import ALGORITHMS, AUXILIARY_MODELS, hyperparameters_of
from megarl.algos.statistics import GRAD_NORM, Statistics
from megarl.checkpoints.snapshots import Digest
from megarl.cluster.actor import Ref, Worker, at_arrival, failure
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.fleet.fault_members import fault_members
from megarl.placement.replicas import outvoted
from megarl.placement.roles import Role, is_reporting_rank
from megarl.recovery.rank_processes import RankProcesses
from megarl.resharding.session import PublishedRank
from megarl.samples.buffer import Entry, RolloutBuffer
from megarl.training.batching import SampleRef, Update, by_sample, key_of, plan_updates, refs_of
from megarl.training.calls import ScoreCall, TokenValuesCall, TrainCall
from megarl.training.flops import speed, train_work
from megarl.training.row_diffs import RowDiffs
from megarl.types import (
    DiskFault,
    FaultMember,
    FloatArray,
    GroupSummary,
    Hyperparameters,
    Metrics,
    SilentFault,
)

GroupBuffer = RolloutBuffer[Ref]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class RolloutBatch:
    """Groups as the controller holds them: summaries here, samples in the object store; index i is the same group."""

    summaries: list[GroupSummary]
    refs: list[Ref]

    @staticmethod
    def of(entries: Sequence[Entry[Ref]]) -> RolloutBatch:
        """The complete groups of a buffer's entries."""
        batch = RolloutBatch([], [])
        for entry in entries:
            if isinstance(entry.summary, GroupSummary) and entry.ref is not None:
                batch.summaries.append(entry.summary)
                batch.refs.append(entry.ref)
        return batch


NO_GROUPS = RolloutBatch([], [])


@dataclass(frozen=True)
class Share:
    """References to a data-parallel rank's part of a step: its updates, and the groups that have its samples."""

    updates: Ref
    groups: Ref


@dataclass(frozen=True)
class PerTokenResults:
    """References to what the ranks of one model computed for the tokens of a step.

    The policy's ranks compute KL penalties, an auxiliary model's values or process rewards. Ranks that hold the same
    samples compute the same, and one of them reports.

    updates: of all data-parallel ranks. shares: of each data-parallel rank. states: of each rank, results that its own
    next call reuses. token_values: of each reporting rank, one reference for each data-parallel rank of the readers.
    """

    updates: Sequence[Update]
    shares: list[Share]
    states: list[Ref]
    token_values: list[list[Ref]]

    def of(self, dp: int) -> list[Ref]:
        """The token values of the readers' data-parallel rank `dp`."""
        return [parts[dp] for parts in self.token_values]

    def for_readers(self) -> PerTokenResults:
        """Without the samples and states of the ranks' own next call, once it is done: the object store frees them."""
        return replace(self, updates=[], shares=[], states=[])


@dataclass(frozen=True)
class Trained:
    """Statistics of each update, and the speed of all."""

    updates: list[Statistics]
    speed: Metrics


class RankGroup:
    """All ranks of one Megatron world, by whichever processes.

    Rank r is on GPU slot first + r. Ranks on `shared` slots take turns with the memory.
    """

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
        self.shares_weights = role.shares_weights
        self._cluster = cluster
        self._recipe = role.recipe
        self._shape = role.shape
        self._layout = role.layout
        self._shared = shared
        self._num_disk_calls = 0
        self.processes = RankProcesses(cluster, role, name=name, target=target, more=more)
        self.started = self.processes.start()

    @property
    def workers(self) -> list[Worker]:
        """By rank."""
        return self.processes.workers

    @property
    def _sharing(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.slot in self._shared]

    def onload(self) -> None:
        self._cluster.call_all(self._sharing, "onload")

    def offload(self) -> None:
        self._cluster.call_all(self._sharing, "offload")

    def held_bytes(self) -> int:
        """Memory of the rank on a shared slot that holds most; 0 where none is shared."""
        return max(self._cluster.call_all(self._sharing, "held_bytes"), default=0)

    def share(self, published: Sequence[PublishedRank]) -> None:
        """Have each rank compute with the frozen weights of the policy's rank on its slot."""
        calls = {}
        for worker, of_policy in zip(self.workers, published, strict=True):
            calls[worker.call("share", of_policy.source)] = worker.name
        self._cluster.gather(calls)

    def save(self, folder: Path) -> None:
        """Begin a checkpoint: what is to be written is copied when this returns."""
        self._saved_in = folder
        self._disk_call("save", folder)

    def has_saved(self) -> bool:
        """Whether all files of the checkpoint that was begun are written, or have failed."""
        return all(self._cluster.call_all(self.workers, "has_saved"))

    def finish_save(self) -> dict[str, Digest]:
        """Wait until all files are written; their digests, as far as the ranks took them.

        Whatever has become of other processes: a run that fails saves what it has begun.
        """
        return _merged(self._disk_call("finish_save", among=self.workers))

    def _disk_call(
        self, method: str, *args: object, among: Sequence[Worker] | None = None
    ) -> list[Any]:
        """Call every rank. Raises DiskFault when all have ended their calls, so that these may go on.

        Raises WorkerFailed, too, where a rank's disk has not answered for run.timeout_s.
        """
        self._num_disk_calls += 1
        number = self._num_disk_calls  # goes on where the ranks are started anew
        calls = {worker.call(method, *args, number): worker.name for worker in self.workers}
        attended = {
            worker.call("attend_disk", number, self._saved_in): worker.name
            for worker in self.workers
        }
        try:
            return self._cluster.gather({**calls, **attended}, among)[: len(calls)]
        except DiskFault:
            if self._cluster.settle(attended):
                for call in calls:
                    failure(call)  # Ray prints what is asked for by nobody
            raise

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def _per_token(
        self,
        method: str,
        algorithm: str,
        updates: Sequence[Update],
        refs: Sequence[Ref],
        readers: Sequence[Update],
    ) -> PerTokenResults:
        """Have each rank compute something of its share's tokens; readers: the plan of the ranks that train on it."""
        num_readers = len(readers[0].micro_batches)
        keys = [frozenset(map(key_of, refs_of(_share(readers, dp)))) for dp in range(num_readers)]
        keys_ref = self._cluster.put(keys)
        results = PerTokenResults(updates, self._shares(updates, refs), [], [])
        calls = {}
        for rank, worker in enumerate(self.workers):
            share = results.shares[self._layout.coords(rank).dp]
            call = TokenValuesCall(
                algorithm=algorithm,
                updates=at_arrival(share.updates),
                groups=at_arrival(share.groups),
            )
            # Ranks that hold the same return their own state alone: each reference costs the controller time.
            if is_reporting_rank(self._layout, rank):
                call = replace(call, readers=at_arrival(keys_ref))
                *token_values, state = worker.call_many(num_readers + 1, method, call)
                results.token_values.append(token_values)
                calls |= dict.fromkeys(token_values, worker.name)
            else:
                (state,) = worker.call_many(1, method, call)
            results.states.append(state)
            calls[state] = worker.name
        self._cluster.await_all(calls)
        return results

    def _shares(self, updates: Sequence[Update], refs: Sequence[Ref]) -> list[Share]:
        """The share of each data-parallel rank, one reference for all ranks with the same samples.

        The first of these ranks fetches the groups, and passes them on without the samples of other shares.
        """
        shares = []
        # in Megatron's order of ranks, data-parallel ranks are so far apart
        step = self._layout.tp * self._layout.cp
        for dp, worker in enumerate(self.workers[: self._layout.dp * step : step]):
            share = _share(updates, dp)
            put = self._cluster.put(share)
            numbers = sorted({ref.group for ref in refs_of(share)})
            groups = [refs[number] for number in numbers]
            own_samples = "megarl.training.batching:own_samples"
            shares.append(Share(put, worker.compute(own_samples, put, numbers, *groups)))
        return shares

    def plan(self, samples: Sequence[SampleRef], hyperparameters: Hyperparameters) -> list[Update]:
        """The step's updates; the micro-batches of each by data-parallel rank.

        Where an algorithm leaves samples out, there are fewer updates in proportion.
        """
        train = self._recipe.train
        rollout = self._recipe.rollout
        updates = train.updates_per_step
        num_samples = len(by_sample(samples))
        if hyperparameters.dynamic_sampling or hyperparameters.overlong_filter:
            share = num_samples / (rollout.prompts_per_step * rollout.samples_per_prompt)
            updates = min(updates, math.ceil(updates * share))
        return plan_updates(
            samples,
            updates=min(updates, num_samples),  # rewards that failed may leave fewer samples too
            dp=self._layout.dp,
            token_budget=train.tokens_per_micro_batch,
            aggregation=hyperparameters.aggregation,
            longest_response=self._recipe.longest_sample,
            work=train_work(self._shape),
            align=self._layout.tokens_align,
            multiple=self._layout.batch_multiple,
            bubble_micro_batches=self._layout.bubble_micro_batches,
            shares_prompts=train.share_prefixes,
            max_cp=self._layout.max_cp,
        )

    def _call(self, method: str, *args: object) -> None:
        self._cluster.gather({worker.call(method, *args): worker.name for worker in self.workers})

    def _train(
        self,
        algorithm: str,
        shares: Sequence[Share],
        lr: float,
        states: Sequence[Ref | None],
        of_others: PerTokenResults | None,
    ) -> list[Statistics]:
        """Train all ranks; the statistics of each update. of_others: the token values of another model's ranks."""
        calls = {}
        for rank, (worker, state) in enumerate(zip(self.workers, states, strict=True)):
            dp = self._layout.coords(rank).dp
            token_values = of_others.of(dp) if of_others else []
            call = TrainCall(
                algorithm=algorithm,
                updates=at_arrival(shares[dp].updates),
                groups=at_arrival(shares[dp].groups),
                lr=lr,
                state=state,
                token_values=[at_arrival(part) for part in token_values],
            )
            calls[worker.call("train", call)] = worker.name
        try:
            parts_of_ranks = self._cluster.gather(calls)
        except SilentFault as fault:
            raise self.located(fault) from None
        if self._recipe.run.compare_replicas_every is not None:
            for norms in zip(*map(_grad_norms, parts_of_ranks), strict=True):
                self._refuse_other_norms(norms)
        # every rank has a part of each update's statistics
        return [_merged(parts) for parts in zip(*parts_of_ranks, strict=True)]

    def located(self, fault: SilentFault) -> SilentFault:
        """The fault of ranks of this group, with their names, GPUs and nodes; an engine's as it is.

        Engines work while ranks do, with `rollout.ahead`.
        """
        if fault.kind == "engine":
            return fault
        workers = {member.number: self.workers[member.number] for member in fault.members}
        return fault.located(fault_members(self._cluster, self._recipe.placement, workers))

    def _refuse_other_norms(self, norms: Sequence[float]) -> None:
        """Raise SilentFault where the norm of one and the same gradient is not the same on all ranks."""
        wrong = outvoted(dict(enumerate(norms)))
        if wrong:
            values = ", ".join(sorted({repr(norm) for norm in norms}))
            what = f"had another norm of the reduced gradient than other ranks ({values})"
            fault = SilentFault("replicas", what, [FaultMember(rank) for rank in wrong])
            raise self.located(fault)


class PolicyRanks(RankGroup):
    """The ranks of the policy."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        super().__init__(
            cluster, role, shared, name="training rank", target="megarl.training.policy:PolicyRank"
        )

    def load_weights(self, folder: Path) -> None:
        """The weights alone of a checkpoint, from any layout."""
        self._call("load_weights", folder)

    def export(self, folder: Path, *, fp8: bool = False, where: str = "") -> None:
        """Write a Hugging Face checkpoint; fp8: linear layers in tiles with scales. where: the key of the folder."""
        self._call("export", folder, fp8, where)

    def round_weights(self, version: int) -> float | None:
        """Round the sums of weights and adapters as engines get this version; the part that rounding has kept."""
        calls = {worker.call("round_weights", version): worker.name for worker in self.workers}
        shares = [share for share in self._cluster.gather(calls) if share is not None]
        return fmean(shares) if shares else None

    def handles(self) -> list[PublishedRank]:
        """Each rank's handles to its parameters."""
        return self._cluster.call_all(self.workers, "handles")

    def plan_of(self, algorithm: str, samples: Sequence[SampleRef]) -> list[Update]:
        """The updates that `train` makes of a step's samples."""
        return self.plan(samples, hyperparameters_of(algorithm, self._recipe.algorithm))

    def row_diffs(self) -> RowDiffs:
        """How far the engines' logprobs are from the trainer's in each row of the last `train`."""
        reporting = [
            worker
            for rank, worker in enumerate(self.workers)
            if is_reporting_rank(self._layout, rank)
        ]
        return RowDiffs.joined(self._cluster.call_all(reporting, "row_diffs"))

    def compute_logprobs(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        readers: Sequence[Update],
    ) -> PerTokenResults:
        """Old and reference logprobs for `train`, and KL penalties for the readers: the critic's plan."""
        updates = self.plan_of(algorithm, samples)
        return self._per_token("compute_logprobs", algorithm, updates, refs, readers)

    def train(
        self,
        algorithm: str,
        samples: Sequence[SampleRef],
        refs: Sequence[Ref],
        lr: float,
        *,
        token_values: PerTokenResults | None = None,
        logprobs: PerTokenResults | None = None,
    ) -> Trained:
        """All optimizer updates of one step. Each rank gets the samples of its own share, and no others.

        token_values: of the auxiliary model, for the advantages. logprobs: of `compute_logprobs` for the same samples,
        where it was called.
        """
        if logprobs:
            updates = logprobs.updates
            began = time.perf_counter()
            shares = logprobs.shares
            states: Sequence[Ref | None] = logprobs.states
        else:
            updates = self.plan_of(algorithm, samples)
            began = time.perf_counter()
            shares = self._shares(updates, refs)
            states = [None] * len(self.workers)
        statistics = self._train(algorithm, shares, lr, states, token_values)
        seconds = time.perf_counter() - began
        by_update = [update.samples for update in updates]
        gpus = self._layout.world_size
        gpu = device.gpu_name()
        shares_prompts = self._recipe.train.share_prefixes
        metrics = speed(self._shape, by_update, seconds, gpus, gpu, shares_prompts=shares_prompts)
        return Trained(statistics, metrics)


class AuxiliaryRanks(RankGroup):
    """The ranks of the critic or of the implicit reward model."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        kind = ALGORITHMS[role.recipe.algorithm.name].critic
        self._model = AUXILIARY_MODELS[kind]
        super().__init__(
            cluster,
            role,
            shared,
            name=f"{self._model.name} rank",
            target="megarl.training.auxiliary:AuxiliaryRank",
            more=[kind],
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
        algorithm = self._recipe.algorithm.name
        return self._per_token("values", algorithm, self.plan_of(samples), refs, readers)

    def train(
        self, token_values: PerTokenResults, lr: float, logprobs: PerTokenResults | None = None
    ) -> list[Statistics]:
        """All optimizer updates of the step on the samples of these values; statistics of each.

        logprobs: with the KL penalties of the samples' tokens, where the algorithm pays them in the reward.
        """
        algorithm = self._recipe.algorithm.name
        shares = token_values.shares
        return self._train(algorithm, shares, lr, token_values.states, logprobs)


class RewardModelRanks(RankGroup):
    """The ranks of the reward model."""

    def __init__(self, cluster: Cluster, role: Role, shared: frozenset[int]) -> None:
        target = "megarl.training.reward_model:RewardModelRank"
        super().__init__(cluster, role, shared, name="reward model rank", target=target)

    def scores(self, refs: Sequence[Ref]) -> list[FloatArray]:
        """The scores of the samples of each group."""
        layout = self._layout
        calls = {}
        for rank, worker in enumerate(self.workers):
            share = refs[layout.coords(rank).dp :: layout.dp]
            call = ScoreCall([at_arrival(ref) for ref in share])
            calls[worker.call("score", call)] = worker.name
        scores: dict[int, FloatArray] = {}
        for rank, of_share in enumerate(self._cluster.gather(calls)):
            if of_share is not None:  # only the last stage has them
                numbers = range(layout.coords(rank).dp, len(refs), layout.dp)
                scores |= zip(numbers, of_share, strict=True)
        return [scores[number] for number in range(len(refs))]


def _grad_norms(updates: Sequence[Statistics]) -> list[float]:
    """The norm of each update's gradient, as one rank states it."""
    return [update[GRAD_NORM][0] for update in updates if GRAD_NORM in update]


def _merged(parts: Iterable[dict[Key, Value]]) -> dict[Key, Value]:
    merged: dict[Key, Value] = {}
    for part in parts:
        merged |= part
    return merged


def _share(updates: Sequence[Update], dp_rank: int) -> list[Update]:
    """One data-parallel rank's part of each update."""
    return [replace(update, micro_batches=(update.micro_batches[dp_rank],)) for update in updates]
