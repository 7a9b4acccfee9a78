"""PRIME's implicit reward model (arXiv 2502.01456): its log-ratio to its initial weights rewards each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algos.losses import LossResult, outcome_loss
from megarl.parallel.sequences import PackedRow
from megarl.training.batching import SampleRef
from megarl.types import FloatArray, Hyperparameters, TrainSequence


def process_rewards(
    logp: Sequence[FloatArray], reference_logp: Sequence[FloatArray], hyperparameters: Hyperparameters
) -> list[FloatArray]:
    """Of each sequence each token's process_scale x log(model / reference)."""
    scale = hyperparameters.process_scale
    return [scale * (own_T - reference_T) for own_T, reference_T in zip(logp, reference_logp, strict=True)]


def label(one: TrainSequence, ref: SampleRef) -> TrainSequence:
    """With the outcome, 1 where the sample is correct, in the advantage's place."""
    return replace(one, advantage_T=one.loss_mask_T.astype(np.float32) * ref.is_correct)


def loss(row: PackedRow, logp_T: torch.Tensor, hyperparameters: Hyperparameters) -> LossResult:
    """The loss sum of one packed row and its statistics, as of `outcome_loss`."""
    return outcome_loss(logp_T, row.targets, scale=hyperparameters.process_scale)
