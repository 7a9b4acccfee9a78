"""Ratios of probabilities and KL estimates that stay finite, whatever the log-probabilities are.

The bounds are verl's. Outside of its bounds a clamped value has no gradient, which is also what makes it safe: exp
would overflow above 88.7 in float32, and the infinite gradient of a ratio that a loss clips would be multiplied by 0 to
NaN. No ordinary ratio is near e^20, 485 million. A k3 of 10 is nearer: the KL's penalty no longer pulls at a token to
which the reference gives more than 13.6 times the policy's probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
KL_BOUND = 10.0


def bounded(log_ratio_T: Tensor) -> Tensor:
    """Log-ratios clamped to +-20; there is no gradient outside of it."""
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - 1 - x of the bounded log-ratios x, at most 10; there is no gradient above it.

    The k3 estimate of KL(p | q) from samples of p with x = log q - log p (Schulman, "Approximating KL divergence",
    2020). By expm1, because in float32 exp(x) - 1 is all rounding where x is about 1e-4.
    """
    log_ratio_T = bounded(log_ratio_T)
    return (torch.expm1(log_ratio_T) - log_ratio_T).clamp(max=KL_BOUND)
