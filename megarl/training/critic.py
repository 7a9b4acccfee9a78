"""The critic: a score of the state before each token, learnt from the returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algos.losses import LossResult, value_loss
from megarl.parallel.sequences import PackedRow
from megarl.training import credit
from megarl.types import FloatArray, Hyperparameters, TrainSequence


def returns(
    sequences: Sequence[TrainSequence],
    old_values: Sequence[FloatArray],
    rewards: Sequence[FloatArray] | None,
    hyperparameters: Hyperparameters,
) -> list[FloatArray]:
    """By GAE, of the values before the step's updates. rewards: of each token, if there are any."""
    lam = hyperparameters.gae_lambda if hyperparameters.critic_lambda is None else hyperparameters.critic_lambda
    return credit.by_values(sequences, old_values, gamma=hyperparameters.gamma, lam=lam, rewards=rewards)[1]


def loss(row: PackedRow, value_T: torch.Tensor, hyperparameters: Hyperparameters) -> LossResult:
    """The loss sum of one packed row and its statistics, as of `value_loss`."""
    assert row.returns is not None
    return value_loss(value_T, row.returns, value_clip=hyperparameters.value_clip)
