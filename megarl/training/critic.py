"""One rank of the critic: the values of all tokens, and steps towards the returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algos import AUXILIARY_AGGREGATION
from megarl.algos.losses import LossResult, value_loss
from megarl.algos.statistics import LOSS, Statistics
from megarl.config import Recipe
from megarl.device import Address
from megarl.parallel.hf_config import scorer_shape
from megarl.parallel.pipeline import Norms
from megarl.parallel.sequences import PackedRow, dealt, unpack, with_returns
from megarl.training import credit
from megarl.training.auxiliary import AuxiliaryRank, MicroBatches
from megarl.types import FloatArray


class CriticRank(AuxiliaryRank):
    """A rank of it. It begins as a classifier, or as a language model with scores of 0."""

    aggregation = AUXILIARY_AGGREGATION["values"]

    def __init__(self, rank: int, recipe: Recipe, meet: Address, first_gpu: int = 0) -> None:
        super().__init__(rank, recipe, meet, scorer_shape(recipe.model.path), first_gpu)

    def values_of(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        """One array per sequence, in order: the value of the state before every token (the first: 0).

        None on all but the last pipeline stage.
        """

        def keep(row: PackedRow, value_T: torch.Tensor) -> tuple[torch.Tensor, list[FloatArray]]:
            return value_T.sum(), unpack(row, value_T)

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
        """One update towards the returns that old values and rewards make by GAE; statistics as of `value_loss`."""
        returns, rules = None, self._rules
        if values is not None:
            flat = [one for batch in micro_batches for one in batch]
            lam = rules.gae_lambda if rules.critic_lambda is None else rules.critic_lambda
            _, returns = credit.by_values(flat, values, gamma=rules.gamma, lam=lam, rewards=rewards)

        def apply_loss(row: PackedRow, value_T: torch.Tensor) -> LossResult:
            assert row.returns is not None
            loss_sum, stats = value_loss(value_T, row.returns, value_clip=rules.value_clip)
            return loss_sum, {LOSS: loss_sum.detach() / norms.denominator, **stats}

        targets = zip(micro_batches, dealt(returns, micro_batches), dealt(values, micro_batches), strict=True)
        rows = [with_returns(self._pack(batch), *pair) for batch, *pair in targets]
        return self._update(rows, apply_loss, norms, lr)
