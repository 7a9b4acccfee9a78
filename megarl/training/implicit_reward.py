"""PRIME's implicit reward model (arXiv 2502.01456): its log-ratio to its initial weights rewards each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algos.losses import LossResult, outcome_loss
from megarl.parallel.sequences import PackedRow
from megarl.types import FloatArray, Hyperparameters


def process_rewards(
    logp: Sequence[FloatArray], reference_logp: Sequence[FloatArray], hyperparameters: Hyperparameters
) -> list[FloatArray]:
    """Of each sequence each token's process_scale x log(model / reference)."""
    scale = hyperparameters.process_scale
    return [scale * (own_T - reference_T) for own_T, reference_T in zip(logp, reference_logp, strict=True)]


def loss(row: PackedRow, logp_T: torch.Tensor, hyperparameters: Hyperparameters) -> LossResult:
    """The loss sum of one packed row and its statistics, as of `outcome_loss`."""
    return outcome_loss(logp_T, row.targets, scale=hyperparameters.process_scale)
