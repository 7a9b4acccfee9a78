"""One rank of PRIME's implicit reward model: process rewards of all tokens, and steps towards the outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.algos import AUXILIARY_AGGREGATION
from megarl.algos.losses import LossResult, outcome_loss
from megarl.algos.statistics import LOSS, Statistics
from megarl.checkpoints import hf_import
from megarl.config import Recipe
from megarl.device import Address
from megarl.parallel import host_offload
from megarl.parallel.hf_config import model_shape
from megarl.parallel.pipeline import Norms
from megarl.parallel.sequences import PackedRow, dealt, unpack
from megarl.training.auxiliary import AuxiliaryRank, MicroBatches
from megarl.training.batching import Piece
from megarl.types import FloatArray


class ImplicitRewardRank(AuxiliaryRank):
    """A rank of it (arXiv 2502.01456): a language model whose log-ratio to what it began as rewards each token."""

    aggregation = AUXILIARY_AGGREGATION["process_rewards"]

    def __init__(self, rank: int, recipe: Recipe, meet: Address, first_gpu: int = 0) -> None:
        super().__init__(rank, recipe, meet, model_shape(recipe.model.path), first_gpu)
        self._reference = host_offload.room_for(self.params())
        hf_import.load_hf(recipe.model.path, self._shards, self._reference)
        self._reference_logp: list[list[FloatArray] | None] = []  # of the shares that were valued, for `train_step`

    def values(self, *said: Any) -> tuple[Piece, ...]:
        self._reference_logp = []
        return super().values(*said)

    def values_of(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        """One array per sequence, in order: each token's process_scale x log(model / reference) (the first: 0).

        None on all but the last pipeline stage.
        """
        own = self._logprobs(micro_batches)
        with host_offload.in_place_of(self.params(), self._reference):
            reference = self._logprobs(micro_batches)
        self._reference_logp.append(reference)
        if own is None or reference is None:
            return None
        scale = self._rules.process_scale
        return [scale * (one_T - other_T) for one_T, other_T in zip(own, reference, strict=True)]

    def _logprobs(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        def keep(row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, list[FloatArray]]:
            return logp_T.sum(), unpack(row, logp_T)

        results = self._model.pipeline.run([self._pack(batch) for batch in micro_batches], keep)
        return [array for arrays in results for array in arrays] if self._model.is_last_stage else None

    def train_step(
        self,
        micro_batches: MicroBatches,
        values: Sequence[FloatArray] | None,
        norms: Norms,
        lr: float,
        rewards: Sequence[FloatArray] | None = None,
    ) -> Statistics:
        """One update towards the outcomes, on the first share valued of those left; statistics of `outcome_loss`."""

        def apply_loss(
            row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor
        ) -> LossResult:
            loss_sum, stats = outcome_loss(logp_T, row.targets, scale=self._rules.process_scale)
            return loss_sum, {LOSS: loss_sum.detach() / norms.denominator, **stats}

        reference = dealt(self._reference_logp.pop(0), micro_batches)
        rows = [self._pack(*one) for one in zip(micro_batches, reference, strict=True)]
        return self._update(rows, apply_loss, norms, lr)
