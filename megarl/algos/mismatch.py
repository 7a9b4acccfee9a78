"""Importance weights for the difference between the engine's and the trainer's probabilities of the same tokens.

With mu the engine's probability of a token and pi_old the trainer's, w = pi_old / mu.
"""

from __future__ import annotations

import torch

from megarl.algos.ratios import bounded, k3
from megarl.algos.segments import segment_mean, segment_sum
from megarl.algos.statistics import Reduction, Statistic, over_tokens, parts
from megarl.algos.targets import Targets
from megarl.types import Hyperparameters

# Bounds of pi_old / mu: of a token, of a sequence's product, of its geometric mean.
MISMATCH_BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "mis_token": (0.0, 2.0),
    "mis_sequence": (0.0, 2.0),
    "mis_geometric": (0.99, 1.01),
    "icepop": (0.5, 5.0),
}
Weighted = tuple[torch.Tensor, dict[Statistic, torch.Tensor]]


def _effective_share(weight: float, weight_square: float, tokens: float) -> float:
    """Effective sample size as a share of the tokens (Kish, 1965), from sums over the tokens."""
    return weight**2 / max(tokens * weight_square, 1e-30)


KL = Statistic("mismatch_kl")  # w - 1 - log w, whose mean over the engine's samples is KL(mu | pi_old)
WEIGHT = Statistic("mismatch_weight")
ESS = Statistic("mismatch_ess", Reduction(_effective_share))
CLIPPED = Statistic("mismatch_clipped")
MASKED = Statistic("mismatch_masked")


def weights(old_logp_T: torch.Tensor, targets: Targets, hyperparameters: Hyperparameters) -> Weighted:
    """(weight_T, without a gradient; statistics), where hyperparameters.mismatch is not off.

    tis: min(w, high), truncated (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    training"). mis_...: w, but 0 where the ratio leaves [low, high]: of the token; of the sequence's product; of its
    geometric mean (Liu et al. 2025, "When speed kills stability"). icepop: the same as mis_token, with a lower bound
    too (Ling team, 2025). A sequence's product is a weight of all its tokens, the geometric mean only decides.
    """
    mask_T = targets.loss_mask_T
    log_w_T = bounded(torch.where(mask_T, old_logp_T - targets.engine_logp_T, 0.0)).detach()
    low, high = bounds(hyperparameters)
    if hyperparameters.mismatch == "tis":
        weight_T = log_w_T.exp().clamp(max=high)
        is_out_T = log_w_T.exp() > high
        return weight_T, _statistics(log_w_T, weight_T, mask_T, clipped=is_out_T, masked=torch.zeros_like(mask_T))
    log_by = {"mis_sequence": segment_sum, "mis_geometric": segment_mean}.get(hyperparameters.mismatch)
    log_ratio_T = bounded(log_by(log_w_T, mask_T, targets.sequence_T)) if log_by else log_w_T
    is_out_T = (log_ratio_T.exp() < low) | (log_ratio_T.exp() > high)
    kept_T = log_ratio_T if hyperparameters.mismatch == "mis_sequence" else log_w_T
    weight_T = torch.where(is_out_T, 0.0, kept_T.exp())
    return weight_T, _statistics(log_w_T, weight_T, mask_T, clipped=torch.zeros_like(mask_T), masked=is_out_T)


def bounds(hyperparameters: Hyperparameters) -> tuple[float, float]:
    """(lowest, highest) ratio that is kept: the hyperparameters', else MISMATCH_BOUNDS; where mismatch is not off."""
    low, high = MISMATCH_BOUNDS[hyperparameters.mismatch]
    given = hyperparameters.mismatch_low, hyperparameters.mismatch_high
    return low if given[0] is None else given[0], high if given[1] is None else given[1]


def _statistics(
    log_w_T: torch.Tensor, weight_T: torch.Tensor, mask_T: torch.Tensor, *, clipped: torch.Tensor, masked: torch.Tensor
) -> dict[Statistic, torch.Tensor]:
    weights_T = torch.where(mask_T, weight_T, 0.0), torch.where(mask_T, weight_T**2, 0.0)
    ess = {ESS: parts(*(one_T.sum() for one_T in weights_T), mask_T.sum())}
    return ess | over_tokens(mask_T, {KL: k3(log_w_T), WEIGHT: weight_T, CLIPPED: clipped, MASKED: masked})
