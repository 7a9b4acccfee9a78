"""One rank of the policy: log-probabilities, advantages, optimizer updates, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from megarl import device
from megarl.algos import (
    ALGORITHMS,
    Loss,
    has_reference,
    hyperparameters_of,
    rollout_correction,
)
from megarl.algos.losses import ENGINE_DIFFS, LossResult, policy_statistics, turn_diffs
from megarl.algos.ratios import bounded
from megarl.algos.statistics import Statistic, Statistics, parts
from megarl.checkpoints.hf_export import Export, export_hf
from megarl.disk import writing
from megarl.model.precision import PLAIN
from megarl.numerics.parts import write_parts
from megarl.parallel import groups, host_offload, model
from megarl.parallel.packing import PackedRow, unpack
from megarl.parallel.routing import Choices
from megarl.placement.expert_places import Places
from megarl.placement.roles import (
    Role,
    is_reporting_rank,
    precision_of,
    reference_copy,
    sent_lora,
    trains_merged,
)
from megarl.resharding.exchanges import Exchanges
from megarl.resharding.memory_handles import share_params
from megarl.resharding.payloads import ReshardStep, exchanged
from megarl.resharding.session import PublishedRank, Session
from megarl.training import credit, kept_tokens, profiling
from megarl.training.batching import TokenValues, Update, refs_of, values_by_reader
from megarl.training.calls import (
    RecordLayersCall,
    TokenValuesCall,
    TokenValuesResult,
    TrainCall,
)
from megarl.training.merged_weights import MergedWeights
from megarl.training.rank import TrainingRank, norms_of
from megarl.training.routing_statistics import routing_statistics
from megarl.training.row_diffs import RowDiffs, ShownSamples, row_diffs
from megarl.training.shares import HostChoices, Logprobs, UpdateShare, moved_to_host, with_logprobs
from megarl.training.train_sequences import train_sequences
from megarl.types import FloatArray, Hyperparameters, SampleGroup, regrouped
from megarl.types.arrays import TokenArrays

# |engine - trainer| logprob, of the first micro-batches
REPLAY_DIFF = Statistic("replay/logprob_diff")
FREE_DIFF = Statistic("replay/logprob_diff_without")  # the same without replay
_NO_GROUPS: Mapping[int, SampleGroup] = {}


class PolicyRank(TrainingRank):
    """A rank of the policy. Raises as a TrainingRank."""

    def __init__(self, rank: int, role: Role, meet: device.Address) -> None:
        recipe = role.recipe
        self._has_reference = has_reference(recipe.algorithm, recipe.reference.use)
        super().__init__(rank, role, meet, is_published=True, reference=reference_copy(recipe))
        self.options = self._model.options
        self.communicator_bytes = lambda: self._model.communicator_bytes
        self._exchanges: Exchanges | None = None
        self._merged: MergedWeights | None = None
        # of the updates of the step; None where nothing reads them
        self._row_diffs: list[RowDiffs] | None = None
        adapters = self._model.adapters
        size = role.lora
        if adapters and size and trains_merged(recipe):
            of_rank = self.shape, self.layout, rank, model.TRANSFORMER_ENGINE
            self._merged = MergedWeights(size, *of_rank, self.params(), self.factors())
            adapters.are_in_weights = True

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._write_merged()

    def load_weights(self, folder: Path) -> None:
        super().load_weights(folder)
        self._write_merged()

    def finish_restore(self, small: bytes) -> None:
        super().finish_restore(small)
        self._write_merged()

    def _write_merged(self) -> None:
        if self._merged:
            self._merged.write()

    def compute_logprobs(self, call: TokenValuesCall) -> TokenValuesResult[Logprobs]:
        """Old and reference logprobs, which are the state for `train`; readers get the KL penalties of their tokens.

        The readers are the ranks of the critic.
        """
        shares = self._shares(call.algorithm, call.updates, call.groups)
        logprobs = self._logprobs(call.algorithm, shares)
        refs = refs_of(call.updates)
        dp_rank = self._model.at.dp
        penalties = values_by_reader(refs, logprobs.kl_penalties, call.readers, dp_rank)
        return TokenValuesResult(penalties, logprobs)

    def train(self, call: TrainCall[Logprobs | None]) -> list[Statistics]:
        """All optimizer updates of one step; metrics of each as of `train_step`.

        The state is that of `compute_logprobs`, where it was called for this step. The token values are the auxiliary
        model's.
        """
        with profiling.profiled():
            return self._train(call)

    def _train(self, call: TrainCall[Logprobs | None]) -> list[Statistics]:
        algorithm = call.algorithm
        hyperparameters = self._hyperparameters(algorithm)
        shares = self._shares(algorithm, call.updates, call.groups)
        logprobs = call.state or self._logprobs(algorithm, shares)
        shares = [with_logprobs(share, logprobs, index) for index, share in enumerate(shares)]
        if rollout_correction.drops(hyperparameters):
            shares = self._kept(call.updates, shares, hyperparameters)
        if self._model.is_last_stage:  # nothing reads an advantage on the others
            shares = self._credited(
                algorithm, call.updates, shares, call.values_by_sample, logprobs.kl_penalties
            )
        loss = ALGORITHMS[algorithm].loss(hyperparameters)
        diffs = self._replay_diffs(shares[0])
        is_sampled = ALGORITHMS[algorithm].learns_from != "demonstrations"
        if is_sampled and is_reporting_rank(self.layout, self.rank):
            self._row_diffs = []
        else:
            self._row_diffs = None
        first, *rest = [self.train_step(share, call.lr, loss, call.groups) for share in shares]
        if hyperparameters.old_logprobs == "engine":
            # only the first update's own pass was of the policy that the engine had
            rest = [
                {key: value for key, value in update.items() if key not in ENGINE_DIFFS}
                for update in rest
            ]
            self._row_diffs = (self._row_diffs or [])[:1]
        return [first | diffs, *rest]

    def row_diffs(self) -> RowDiffs:
        """Of the rows of the last `train` on this data-parallel rank; none on ranks that do not report."""
        return RowDiffs.joined(self._row_diffs or [])

    def _hyperparameters(self, algorithm: str) -> Hyperparameters:
        return hyperparameters_of(algorithm, self._recipe.algorithm)

    def _shares(
        self, algorithm: str, updates: Sequence[Update], groups_by_id: Mapping[int, SampleGroup]
    ) -> list[UpdateShare]:
        """This rank's sequences of each update, with the choices of experts that are replayed.

        These are the engine's (r3), or, where there is a pass of the old policy, those that it will have recorded (r2).
        """
        hyperparameters = self._hyperparameters(algorithm)
        (replay, temperature) = self._sampling(algorithm)
        shares = []
        row = ALGORITHMS[algorithm]
        is_sampled = row.learns_from == "rewards"
        has_pass = len(row.updates_with_pass(hyperparameters, len(updates))) > 0
        for update in updates:
            weights = hyperparameters.aggregation, update.nll_weight(hyperparameters.positive_nll)
            micro_batches = train_sequences(update.micro_batches[0], groups_by_id, *weights)
            if replay == "r3":
                choices = [self._engine_choices(self._pack(batch)) for batch in micro_batches]
            elif replay == "r2" and has_pass:
                choices = [Choices(is_recording=True) for _ in micro_batches]
            else:
                choices = None
            share = UpdateShare(
                micro_batches,
                norms_of(update),
                choices=choices,
                temperature=temperature,
                has_turns=update.has_turns and is_sampled,
            )
            shares.append(share)
        return shares

    def _sampling(self, algorithm: str) -> tuple[str, float]:
        """(train.replay, temperature) of the samples: no engine chose experts for demonstrations, or sampled them."""
        if ALGORITHMS[algorithm].learns_from == "demonstrations":
            return "off", 1.0
        return self._recipe.train.replay, self._recipe.rollout.temperature

    def _logprobs(self, algorithm: str, shares: Sequence[UpdateShare]) -> Logprobs:
        """Log-probabilities by the policy as it is now, then by the reference, where the updates read them."""
        hyperparameters = self._hyperparameters(algorithm)
        (replay, temperature) = self._sampling(algorithm)
        old: list[list[FloatArray] | None] = [None for _ in shares]
        choices: list[list[HostChoices] | None] = [None for _ in shares]
        indices = ALGORITHMS[algorithm].updates_with_pass(hyperparameters, len(shares))
        with_pass = [shares[index] for index in indices]
        choices_of_batches = [*chain(*(share.choices or () for share in with_pass))]
        micro_batches = [share.micro_batches for share in with_pass]
        outputs = self.outputs_by_share(micro_batches, choices_of_batches or None, temperature)
        for index, share, logprobs in zip(indices, with_pass, outputs, strict=True):
            old[index] = logprobs
            if replay == "r2":
                choices[index] = [
                    moved_to_host(batch_choices) for batch_choices in share.choices or ()
                ]
        reference: list[list[FloatArray] | None] = [None for _ in shares]
        if self._has_reference and ALGORITHMS[algorithm].learns_from == "rewards":
            with self._as_reference():
                reference = self.outputs_by_share(
                    [share.micro_batches for share in shares], temperature=temperature
                )
        penalties = None
        if hyperparameters.pays_kl and self._model.is_last_stage:
            flat_old, flat_reference = (
                [logp for arrays in of for logp in arrays or ()] for of in (old, reference)
            )
            penalties = credit.kl_penalties(flat_old, flat_reference, hyperparameters)
        return Logprobs(old, reference, choices, penalties)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Compute with the reference's weights inside the block."""
        with ExitStack() as stack:
            if self._model.adapters:
                stack.enter_context(self._model.adapters.without())
            if self._merged:
                stack.enter_context(self._merged.frozen())
            if self._reference:
                stack.enter_context(host_offload.swapped_in(self.params(), self._reference))
            yield

    def _kept(
        self,
        updates: Sequence[Update],
        shares: Sequence[UpdateShare],
        hyperparameters: Hyperparameters,
    ) -> list[UpdateShare]:
        """The shares without the tokens that the rollout correction drops, divided by what all ranks keep together.

        The last stage knows the old log-probabilities, and every stage divides its gradients. Collective.
        """
        batches_by_share = [share.micro_batches for share in shares]
        counts_U3 = torch.zeros(len(shares), 3, dtype=torch.float64)
        if self._model.is_last_stage:
            batches_by_share = [
                kept_tokens.without_dropped(
                    share.micro_batches, share.old_logp or [], hyperparameters
                )
                for share in shares
            ]
            counts_U3 = torch.from_numpy(
                np.stack([kept_tokens.counts_of(batches) for batches in batches_by_share])
            )
        counts_U3 = groups.over_pp(groups.over_dp(counts_U3)).long()
        kept = []
        for update, share, micro_batches, counts in zip(
            updates, shares, batches_by_share, counts_U3.tolist(), strict=True
        ):
            of_kept = kept_tokens.divided_by_kept(
                update, counts, hyperparameters, self._recipe.longest_sample
            )
            weighted = kept_tokens.reweighted(micro_batches, of_kept, hyperparameters)
            kept.append(replace(share, micro_batches=weighted, norms=norms_of(of_kept)))
        return kept

    def _credited(
        self,
        algorithm: str,
        updates: Sequence[Update],
        shares: Sequence[UpdateShare],
        token_values: TokenValues,
        kl_penalties: TokenArrays | None,
    ) -> list[UpdateShare]:
        """The shares with an advantage for each token."""
        flat = credit.with_token_advantages(
            ALGORITHMS[algorithm],
            self._hyperparameters(algorithm),
            refs_of(updates),
            [sequence for share in shares for batch in share.micro_batches for sequence in batch],
            token_values,
            kl_penalties,
            sum_over_all=groups.over_dp,
            max_over_all=partial(groups.over_dp, op=dist.ReduceOp.MAX),
        )
        batches = regrouped(flat, [batch for share in shares for batch in share.micro_batches])
        of_shares = regrouped(batches, [share.micro_batches for share in shares])
        return [
            replace(share, micro_batches=micro_batches)
            for share, micro_batches in zip(shares, of_shares, strict=True)
        ]

    def _engine_choices(self, row: PackedRow) -> Choices:
        """The engine's experts of a row's tokens that this tensor-parallel rank has."""
        if row.experts_LMK is None:  # a row of padding, or samples that no engine made
            return Choices()
        mine_LMK = row.experts_LMK.split(len(row.experts_LMK) // self.layout.tp)[self._model.at.tp]
        own_layers = self._model.own_moe_layers()
        return Choices(
            {
                layer: mine_LMK[:, index].to(torch.int16)
                for index, layer in enumerate(self._model.moe_layers())
                if layer in own_layers
            }
        )

    def train_step(
        self,
        share: UpdateShare,
        lr: float,
        loss: Loss,
        groups_by_id: Mapping[int, SampleGroup] = _NO_GROUPS,
    ) -> Statistics:
        """One optimizer update on this data-parallel rank's micro-batches (as many as on every other rank).

        groups_by_id: that the sequences are of, by which `row_diffs` tells the versions and tokens of their rows.
        The gradient is that of the loss sums over all ranks / denominator. Returns grad_norm (before clipping) and the
        `routing_statistics`, and on the last stage the loss, `policy_statistics` and the loss's statistics,
        over all data-parallel ranks. Raises SilentFault as the guard of updates.
        """

        passed: list[tuple[PackedRow, Tensor]] = []

        def row_loss(row: PackedRow, logp_T: Tensor, entropy_T: Tensor) -> LossResult:
            if row.old_logp_T is None:
                old_logp_T = logp_T.detach()
                passed.append((row, old_logp_T))
            else:
                old_logp_T = row.old_logp_T
            loss_sum, stats = loss(logp_T, entropy_T, old_logp_T, row.targets)
            if share.has_turns:
                diffs = turn_diffs(old_logp_T, row.targets)
            else:
                diffs = {}
            return loss_sum, stats | policy_statistics(logp_T, entropy_T, row.targets) | diffs

        rows = self._rows(share.micro_batches, share.old_logp, share.reference_logp)
        statistics, routing_sums = self._update(
            rows, row_loss, share.norms, lr, choices=share.choices, temperature=share.temperature
        )
        if self._row_diffs is not None:
            own_logp = [logp_T for row, of_row_T in passed for logp_T in unpack(row, of_row_T)]
            sequences = [sequence for batch in share.micro_batches for sequence in batch]
            # of the ranks that have a sequence the first one reports
            reports = [self._model.at.dp % sequence.cp == 0 for sequence in sequences]
            own_sequences = list(compress(sequences, reports))
            reported_logp = list(compress(share.old_logp or own_logp, reports))
            shown = ShownSamples(self._recipe)
            self._row_diffs.append(row_diffs(own_sequences, reported_logp, groups_by_id, shown))
        self._write_merged()
        return statistics | routing_statistics(
            routing_sums,
            share.norms,
            self.shape,
            self._model.moe_layers(),
            trains_mtp=self._recipe.train.mtp_loss > 0,
        )

    def _replay_diffs(self, share: UpdateShare) -> Statistics:
        """|engine - trainer| logprob with and without replay, over the first micro-batches' tokens to train on.

        Without those that earlier policies sampled: there the difference is the policies' own.
        """

        def diff(row: PackedRow, logp_T: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            targets = row.targets
            is_fresh_T = targets.sampled_T & ~targets.is_stale_T
            diff_T = torch.where(is_fresh_T, bounded(logp_T - targets.engine_logp_T).abs(), 0.0)
            return logp_T.sum(), torch.stack([diff_T.sum(), is_fresh_T.sum()])

        if not share.choices:
            return {}
        few = self.layout.batch_multiple
        rows = self._rows(share.micro_batches[:few])
        run = partial(self._model.pipeline.run, temperature=share.temperature)
        with_replay = run(rows, diff, choices=share.choices[:few])
        without = run(rows, diff)
        if not self._model.is_last_stage:
            return {}
        statistics = [
            {REPLAY_DIFF: parts(replay_diff, tokens), FREE_DIFF: parts(free_diff, tokens)}
            for (replay_diff, tokens), (free_diff, _) in zip(
                with_replay.results, without.results, strict=True
            )
        ]
        return groups.reduce_stats(statistics, self._copies(rows))

    def record_layers(self, call: RecordLayersCall) -> None:
        """Write what each operation of this rank's layers gives for a micro-batch into a folder, for `compare`."""
        sequences = call.sequences(self.layout.max_cp)
        parts = self._model.layer_outputs(sequences, self._engine_choices, call.num_terms)
        write_parts(call.file(self.rank), parts)

    def export(self, folder: Path, fp8: bool = False, where: str = "") -> None:
        """Write the weights as a Hugging Face checkpoint, with the configuration and tokenizer of model.path.

        fp8: the weights that fp8 engines of the recipe have in tiles of 128 x 128 with scales. Raises DiskFault, which
        names `where`, or the folder.
        """
        recipe = self._recipe
        job = Export(
            folder=str(folder),
            source=recipe.model.path,
            shape=self.shape,
            layout=self.layout,
            rank=self.rank,
            transformer_engine=model.TRANSFORMER_ENGINE,
            dtype=recipe.model.dtype,
            gpus_per_node=recipe.placement.gpus_per_node,
            timeout_s=recipe.run.timeout_s,
            lora=sent_lora(recipe, self.shape),
            precision=precision_of(recipe, "fp8") if fp8 else PLAIN,
            rope_scaling=recipe.model.rope_values,
        )
        store = PrefixStore(f"export {folder}", self._store)
        with writing(folder.parent, folder.name, where or str(folder)):
            export_hf(job, self.params() | self.factors(), store)

    def handles(self) -> PublishedRank:
        """Let another process of this GPU map the parameters; they stay where they are for this one."""
        return PublishedRank(share_params(self.params() | self.factors()), model.TRANSFORMER_ENGINE)

    def round_weights(self, version: int) -> float | None:
        """As of `MergedWeights`; None where the weights are not merged here."""
        if self._merged:
            return self._merged.round_weights(version)
        return None

    def reshard(
        self,
        session: Session,
        version: int,
        attempt: int,
        steps: Sequence[ReshardStep],
        places: Places | None = None,
    ) -> None:
        """Take part in exchanges for a GPU without an engine: this rank only sends. attempt: never the same twice.

        places: of the engines' experts; None: as numbered.
        """
        if self._exchanges and self._exchanges.session != session:  # of another number of engines
            self._end_exchanges()
        if self._exchanges is None:
            self._exchanges = Exchanges(session, self.params() | self.factors())
        try:
            for payload in exchanged(steps):
                member = self._exchanges.of(payload)
                member.place(places)
                member.run(version, attempt)
        except Exception:
            # with the connections to the store: one that is broken stays so
            self._end_exchanges()
            raise

    def _end_exchanges(self) -> None:
        """The next exchange opens new connections."""
        if self._exchanges:
            self._exchanges.close()
            self._exchanges = None
