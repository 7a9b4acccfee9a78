"""One training rank's process: its part of the model, the optimizer, logprobs and steps."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megarl import device
from megarl.algos import ALGORITHMS, Algorithm, Loss, has_reference, hyperparameters_of
from megarl.algos.losses import LossResult, policy_statistics
from megarl.algos.statistics import GRAD_NORM, LOSS, UPDATE_MEAN, Statistic, Statistics, parts
from megarl.checkpoints import hf_import
from megarl.checkpoints.hf_export import Export, export_hf
from megarl.checkpoints.rank_files import RankFiles
from megarl.checkpoints.snapshots import Digest
from megarl.config import Recipe
from megarl.parallel import groups, host_offload, model
from megarl.parallel.hf_config import model_shape
from megarl.parallel.pipeline import Norms
from megarl.parallel.rank_model import RankModel
from megarl.parallel.routing import Choices, engine_choices
from megarl.parallel.sequences import PackedRow, dealt, pack, unpack
from megarl.resharding import megatron_map
from megarl.resharding.member import Member
from megarl.resharding.memory_handles import SourceHandles, publish
from megarl.resharding.session import Session
from megarl.training import credit
from megarl.training.batching import Key, Piece, SampleRef, Update, pieces_of, train_sequences
from megarl.types import FloatArray, Hyperparameters, SampleGroup, TrainSequence

MicroBatches = Sequence[Sequence[TrainSequence]]
_ROUTING = ("aux_loss", "z_loss", "mtp_loss", "differing_choices", "replayed_choices")
AUX_LOSS, Z_LOSS, MTP_LOSS = (Statistic(name, UPDATE_MEAN) for name in _ROUTING[:3])
DIFFERING_SHARE = Statistic("replay/differing_share")  # of the replayed choices, those that are not the router's own
REPLAY_GAP = Statistic("replay/logprob_gap")  # |engine - trainer| logprob, of the first micro-batches
FREE_GAP = Statistic("replay/logprob_gap_without")  # the same without replay


@dataclass(frozen=True)
class PublishedRank:
    """What an engine process needs to map this rank's parameters, and whose names they go by."""

    source: SourceHandles
    transformer_engine: bool


@dataclass(frozen=True)
class UpdateShare:
    """This rank's share of one update. old_logp: of the policy before this step's updates; None: it is the current one.

    choices: of the experts, one for each micro-batch. temperature: of the policy, as `PolicyRank.logprobs`.
    """

    micro_batches: MicroBatches
    norms: Norms
    old_logp: Sequence[FloatArray] | None = None
    choices: Sequence[Choices] | None = None
    reference_logp: Sequence[FloatArray] | None = None
    temperature: float = 1.0


class PolicyRank:
    """Rank `rank` of the training world. Every method but `params` is called on all ranks together.

    The constructor meets the other ranks at the store at `meet`, builds this rank's part of the model and loads
    its weights from the HF checkpoint. Raises UserFault for a checkpoint or Megatron option that does not fit.
    """

    def __init__(self, rank: int, recipe: Recipe, meet: device.Address) -> None:
        gc.freeze()  # what the imports made is never garbage, and walking it takes half a second
        path = recipe.model.path
        self.rank, self.device, self._recipe = rank, device.DEVICE, recipe
        self.shape = model_shape(path)
        self._store = device.join_store(meet, recipe.run.timeout_s)
        self._model = RankModel(rank, recipe, self.shape, self._store, slot=rank)
        self.layout = self._model.layout
        shards = megatron_map.shards(self.shape, self.layout, rank, model.TRANSFORMER_ENGINE)
        hf_import.load_hf(path, shards, self.params())
        self._model.make_optimizer()
        has_one = has_reference(recipe.algorithm, recipe.reference.use)
        self._reference = host_offload.room_for(self.params()) if has_one else {}
        if self._reference:
            hf_import.load_hf(recipe.reference.path or path, shards, self._reference)
        self.communicator_bytes = lambda: self._model.communicator_bytes
        self.options = self._model.options
        self.offload, self.onload, self.held_bytes = self._model.offload, self._model.onload, device.held_bytes
        self._member: Member | None = None
        self._observed: list[UpdateShare] = []

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's weights by the map's names: views of long-lived buffers that every step updates in place."""
        return self._model.params()

    def observe(
        self,
        algorithm: str,
        keeps: bool,
        updates: Sequence[Update],
        readers: Sequence[frozenset[Key]],
        group_ids: Sequence[int],
        *samples: SampleGroup,
    ) -> tuple[Piece, ...]:
        """Look at this rank's share of a step: its tokens' KL penalties, a piece for each reader.

        Pieces are empty but on one of the ranks that hold the same. keeps: for `train`, which then does not look again.
        """
        parts = self._look(algorithm, updates, dict(zip(group_ids, samples, strict=True)))
        penalties = self._penalties(parts, hyperparameters_of(algorithm, self._recipe.algorithm))
        self._observed = parts if keeps else []
        return pieces_of(_refs(updates), penalties if self._model.is_reporting_rank else None, readers)

    def train(
        self, algorithm: str, updates: Sequence[Update], lr: float, group_ids: Sequence[int], *given: Any
    ) -> list[Statistics]:
        """All optimizer updates of one step; an update's micro_batches[0] are this data-parallel rank's.

        given: first the groups that micro-batches call group_ids, in their order, then what the critic's ranks said of
        this rank's samples. Metrics of each update as of `train_step`.
        """
        row, rules = ALGORITHMS[algorithm], hyperparameters_of(algorithm, self._recipe.algorithm)
        by_id = dict(zip(group_ids, given[: len(group_ids)], strict=True))
        parts = self._observed or self._look(algorithm, updates, by_id)
        self._observed = []
        if self._model.is_last_stage:  # on the others nobody reads an advantage
            parts = self._credited(row, rules, updates, parts, given[len(group_ids) :])
        loss = row.loss(rules)
        gaps = self._replay_gaps(parts[0])
        first, *rest = [self.train_step(part, lr, loss) for part in parts]
        return [first | gaps, *rest]

    def _look(self, algorithm: str, updates: Sequence[Update], by_id: Mapping[int, SampleGroup]) -> list[UpdateShare]:
        """The shares of a step's updates, with what the old policy and the reference say where that is read."""
        row, rules = ALGORITHMS[algorithm], hyperparameters_of(algorithm, self._recipe.algorithm)
        # Only later updates of a step train a policy that is no longer the one that the ratio is to.
        many = len(updates) > 1 or rules.pays_kl
        # Nobody chose experts for demonstrations, or sampled them at a temperature.
        is_sampled, replay, temperature = row.learns_from == "rewards", "off", 1.0
        if is_sampled:
            replay, temperature = self._recipe.train.replay, self._recipe.rollout.temperature
        parts = []
        for update in updates:
            nll_weight = update.nll_weight(rules.positive_nll)
            share = train_sequences(update.micro_batches[0], by_id, rules.aggregation, nll_weight)
            parts.append(self._part(share, update, many, replay, temperature))
        if self._reference and is_sampled:
            with host_offload.in_place_of(self.params(), self._reference):
                logps = [self.logprobs(part.micro_batches, temperature=temperature) for part in parts]
            parts = [replace(part, reference_logp=logp) for part, logp in zip(parts, logps, strict=True)]
        return parts

    def _credited(
        self,
        row: Algorithm,
        rules: Hyperparameters,
        updates: Sequence[Update],
        parts: Sequence[UpdateShare],
        pieces: Sequence[Piece],
    ) -> list[UpdateShare]:
        """The parts with an advantage for each token."""
        flat = credit.credited(
            row,
            rules,
            _refs(updates),
            [one for part in parts for batch in part.micro_batches for one in batch],
            {key: value_T for piece in pieces for key, value_T in piece.items()},
            self._penalties(parts, rules),
            sum_over_all=groups.sum_over_dp,
            max_over_all=groups.max_over_dp,
        )
        left = iter(flat)
        return [
            replace(part, micro_batches=[[next(left) for _ in batch] for batch in part.micro_batches])
            for part in parts
        ]

    def _penalties(self, parts: Sequence[UpdateShare], rules: Hyperparameters) -> list[FloatArray] | None:
        """What each token pays for its distance from the reference, where it does; None but on the last stage."""
        if not (rules.pays_kl and self._model.is_last_stage):
            return None
        old = [one for part in parts for one in part.old_logp or ()]
        reference = [one for part in parts for one in part.reference_logp or ()]
        return credit.kl_penalties(old, reference, rules)

    def _part(self, share: MicroBatches, update: Update, many: bool, replay: str, temperature: float) -> UpdateShare:
        """With what the old policy says of it, where that is asked for."""
        norms = Norms(update.denominator, update.tokens, update.loss_tokens)
        choices = None
        if replay == "r2" and many:
            choices = [Choices(is_noting=True) for _ in share]
        elif replay == "r3":
            choices = [self._engine_choices(self._pack(batch)) for batch in share]
        old = self.logprobs(share, choices, temperature) if many else None
        for one in choices or ():
            one.is_noting = False
        return UpdateShare(share, norms, old, choices, temperature=temperature)

    def _engine_choices(self, row: PackedRow) -> Choices:
        if row.experts_LMK is None:  # a row of padding, or samples that no engine made
            return Choices()
        return engine_choices(row, self._model.moe_layers(), self._model.at.tp, self.layout.tp)

    def logprobs(
        self, micro_batches: MicroBatches, choices: Sequence[Choices] | None = None, temperature: float = 1.0
    ) -> list[FloatArray] | None:
        """One array per sequence, in order: log p of every token given those before it (the first: 0).

        p = softmax(logits / temperature). None on all but the last pipeline stage.
        """

        def keep(row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, list[FloatArray]]:
            return logp_T.sum(), unpack(row, logp_T)

        rows = [self._pack(batch) for batch in micro_batches]
        results = self._model.pipeline.run(rows, keep, choices=choices, temperature=temperature)
        return [array for arrays in results for array in arrays] if self._model.is_last_stage else None

    def train_step(self, part: UpdateShare, lr: float, loss: Loss) -> Statistics:
        """One optimizer update on this data-parallel rank's micro-batches (as many as on every other rank).

        The gradient is that of the loss sums over all ranks / denominator. Returns grad_norm (before clipping) and what
        `_routing_stats` says, and on the last stage loss, `policy_statistics` and the loss's statistics over all
        data-parallel ranks. Raises FloatingPointError when the gradient is not finite.
        """

        def apply_loss(row: PackedRow, logp_T: torch.Tensor, entropy_T: torch.Tensor) -> LossResult:
            old_logp_T = logp_T.detach() if row.old_logp_T is None else row.old_logp_T
            old_logp_T = torch.where(row.targets.is_stale_T, row.targets.engine_logp_T, old_logp_T)
            loss_sum, stats = loss(logp_T, entropy_T, old_logp_T, row.targets)
            stats |= policy_statistics(logp_T, entropy_T, row.targets)
            return loss_sum, {LOSS: loss_sum.detach() / part.norms.denominator, **stats}

        self._model.zero_grad()
        old, reference = (dealt(one, part.micro_batches) for one in (part.old_logp, part.reference_logp))
        rows = [self._pack(*one) for one in zip(part.micro_batches, old, reference, strict=True)]
        run, temperature = self._model.pipeline.run, part.temperature
        stats = run(rows, apply_loss, norms=part.norms, choices=part.choices, temperature=temperature)
        grad_norm = self._model.step(lr)
        reduced = groups.reduced(stats) if self._model.is_last_stage else {}
        return {**reduced, GRAD_NORM: (grad_norm,), **self._routing_stats(part.norms)}

    def _replay_gaps(self, part: UpdateShare) -> Statistics:
        """What replay does to |engine - trainer| logprob, summed over the first micro-batches' masked tokens."""

        def gap(row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            targets = row.targets
            gap_T = torch.where(targets.loss_mask_T, (logp_T - targets.engine_logp_T).abs(), 0.0)
            return logp_T.sum(), torch.stack([gap_T.sum(), targets.loss_mask_T.sum()])

        if not part.choices:
            return {}
        few = self.layout.pp if self.layout.vpp > 1 else 1  # an interleaved pipeline takes no fewer
        rows = [self._pack(batch) for batch in part.micro_batches[:few]]
        run = partial(self._model.pipeline.run, temperature=part.temperature)
        with_replay, without = run(rows, gap, choices=part.choices[:few]), run(rows, gap)
        if not self._model.is_last_stage:
            return {}
        (replay_gap, tokens), (free_gap, _) = torch.stack(with_replay).sum(0), torch.stack(without).sum(0)
        return groups.reduced([{REPLAY_GAP: parts(replay_gap, tokens), FREE_GAP: parts(free_gap, tokens)}])

    def _routing_stats(self, norms: Norms) -> Statistics:
        """The auxiliary losses as means over tokens (and layers), and sums of replayed choices, over all ranks."""
        sums = self._model.pipeline.routing.sums
        if not self.shape.num_experts:
            return {}
        values = torch.stack([torch.as_tensor(sums.get(name, 0.0), dtype=torch.float64).cpu() for name in _ROUTING])
        values = values.to(self.device)
        dist.all_reduce(values)
        found: dict[str, float] = dict(zip(_ROUTING, values.tolist(), strict=True))
        layers = len(self._model.moe_layers()) + self.shape.num_mtp_layers * bool(self._recipe.train.mtp_loss)
        units = {AUX_LOSS: norms.tokens * layers, Z_LOSS: norms.tokens * layers, MTP_LOSS: norms.loss_tokens}
        stats: Statistics = {one: (found[one.name] / unit,) for one, unit in units.items() if found[one.name]}
        if found["replayed_choices"]:
            stats[DIFFERING_SHARE] = found["differing_choices"], found["replayed_choices"]
        return stats

    def _pack(
        self,
        batch: Sequence[TrainSequence],
        old_logp: Sequence[FloatArray] | None = None,
        reference_logp: Sequence[FloatArray] | None = None,
    ) -> PackedRow:
        split = self._model.split
        return pack(batch, split=split, device=self.device, old_logp=old_logp, reference_logp=reference_logp)

    def save(self, folder: Path) -> None:
        """Begin to write this rank's part of a checkpoint into an empty folder; training may go on meanwhile."""
        self._saving = RankFiles(folder, self._model)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; the digests of this rank's own."""
        return self._saving.finish()

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint that `save` wrote, in this layout or another."""
        self._model.load(folder)

    def load_weights(self, folder: Path) -> None:
        """The weights alone of such a checkpoint."""
        self._model.load_weights(folder)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, with the configuration and tokenizer of model.path."""
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
        )
        export_hf(job, self.params(), PrefixStore(f"export {folder}", self._store))

    def publish(self) -> PublishedRank:
        """Let another process of this GPU map the parameters; they stay where they are for this one."""
        return PublishedRank(publish(self.params()), model.TRANSFORMER_ENGINE)

    def reshard(self, session: Session, version: int, attempt: int) -> None:
        """Take part in an exchange for a GPU without an engine: this rank only sends. attempt: never the same twice."""
        if self._member is None:
            self._member = Member(session, self.params())
        self._member.run(version, attempt)


def _refs(updates: Sequence[Update]) -> list[SampleRef]:
    """Every sample of this rank's share, in order."""
    return [ref for update in updates for batch in update.micro_batches[0] for ref in batch]
