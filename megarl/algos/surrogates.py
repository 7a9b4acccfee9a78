"""The objective of one token, before it is weighted: each algorithm's own.

All take a packed row of T tokens with log-ratios to the old policy, which are 0 where the token is masked and within
+-20 elsewhere (`ratios.bounded`), and return (loss_T, statistics), each statistic with a value of every token [T].
Values of masked tokens are not read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algos.segments import segment_mean
from megarl.algos.statistics import CLIPPED, Statistic
from megarl.algos.targets import Targets
from megarl.types import Hyperparameters

SurrogateResult = tuple[Tensor, dict[Statistic, Tensor]]
Surrogate = Callable[[Tensor, Tensor, Targets, Hyperparameters], SurrogateResult]


def clipped(
    logp_T: Tensor,
    log_ratio_T: Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> SurrogateResult:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7).

    With dual_clip c the objective is at least c A where A < 0 (arXiv 1912.09729, eq. 5).
    """
    advantage_T = targets.advantage_T
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - hyperparameters.clip_low, 1.0 + hyperparameters.clip_high)
    objective_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    is_clipped_T = clipped_T * advantage_T < ratio_T * advantage_T
    if hyperparameters.dual_clip is not None:
        floor_T = hyperparameters.dual_clip * advantage_T
        is_held_T = (advantage_T < 0) & (objective_T < floor_T)
        objective_T = torch.where(is_held_T, floor_T, objective_T)
        is_clipped_T = is_clipped_T | is_held_T
    return -objective_T, {CLIPPED: is_clipped_T}


def sequence_clipped(
    logp_T: Tensor,
    log_ratio_T: Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> SurrogateResult:
    """The same with each sequence's s = exp(mean_t log r) in the place of its tokens' ratios (GSPO, arXiv 2507.18071).

    So that tokens' mean is the sequence's objective.
    """
    return clipped(
        logp_T,
        segment_mean(log_ratio_T, targets.loss_mask_T, targets.sequence_T),
        targets,
        hyperparameters,
    )


def cispo(
    logp_T: Tensor,
    log_ratio_T: Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> SurrogateResult:
    """-clip(r, 1 - low, 1 + high) A log pi, the clipped ratio a constant (CISPO, arXiv 2506.13585, eq. 4)."""
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - hyperparameters.clip_low, 1.0 + hyperparameters.clip_high)
    return -weight_T * targets.advantage_T * logp_T, {CLIPPED: weight_T != ratio_T}


def reinforce(
    logp_T: Tensor,
    log_ratio_T: Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> SurrogateResult:
    """-A log pi (Williams, 1992)."""
    return -targets.advantage_T * logp_T, {CLIPPED: torch.zeros_like(targets.loss_mask_T)}
