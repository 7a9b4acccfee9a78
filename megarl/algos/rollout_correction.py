"""Importance weights for the difference between the engine's and the trainer's probabilities of the same tokens.

With mu the engine's probability of a token and pi_old the trainer's, w = pi_old / mu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.ratios import bounded, k3
from megarl.algos.segments import segment_mean, segment_sum
from megarl.algos.statistics import Reduction, Statistic, over_tokens, parts
from megarl.algos.targets import Targets
from megarl.types import Hyperparameters

# Bounds of pi_old / mu: of a token, of a sequence's product, of its geometric mean.
ROLLOUT_CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "mis_token": (0.0, 2.0),
    "mis_sequence": (0.0, 2.0),
    "mis_geometric": (0.99, 1.01),
    "icepop": (0.5, 5.0),
}
Weighted = tuple[Tensor, dict[Statistic, Tensor]]


def _effective_share(weight: float, weight_square: float, tokens: float) -> float:
    """Effective sample size as a share of the tokens (Kish, 1965), from sums over the tokens."""
    return weight**2 / max(tokens * weight_square, 1e-30)


# w - 1 - log w, whose mean over the engine's samples is KL(mu | pi_old)
KL = Statistic("rollout_correction_kl")
WEIGHT = Statistic("rollout_correction_weight")
ESS = Statistic("rollout_correction_ess", Reduction(_effective_share))
CLIPPED = Statistic("rollout_correction_clipped")
MASKED = Statistic("rollout_correction_masked")
# The same of the tokens that the policy itself sampled, where only rounding differs, and of those of earlier policies.
_BY_AGE = {
    age: {
        statistic: Statistic(f"{statistic.name}_{age}")
        for statistic in (KL, WEIGHT, CLIPPED, MASKED)
    }
    for age in ("fresh", "stale")
}


def drops(hyperparameters: Hyperparameters) -> bool:
    """Whether the correction drops what is out of bounds, so that the old policy is asked before the update."""
    return hyperparameters.rollout_correction not in ("off", "tis")


def dropped(
    old_logp_T: Tensor,
    engine_logp_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    hyperparameters: Hyperparameters,
) -> Tensor:
    """Which tokens of the mask are out of bounds, where `drops`: they leave the loss with all of its terms.

    By the ratio of the token (mis_token; icepop: with a lower bound too, Ling team, 2025), by the product of its
    sequence (mis_sequence) or its geometric mean (mis_geometric; Liu et al. 2025, "When speed kills stability").
    """
    log_w_T = bounded(torch.where(mask_T, old_logp_T - engine_logp_T, 0.0))
    log_by = {"mis_sequence": segment_sum, "mis_geometric": segment_mean}.get(
        hyperparameters.rollout_correction
    )
    ratio_T = bounded(log_by(log_w_T, mask_T, sequence_T) if log_by else log_w_T).exp()
    low, high = bounds(hyperparameters)
    return mask_T & ((ratio_T < low) | (ratio_T > high))


def weights(old_logp_T: Tensor, targets: Targets, hyperparameters: Hyperparameters) -> Weighted:
    """(weight_T, without a gradient; statistics over all sampled tokens), where hyperparameters.rollout_correction is
    not off.

    tis: min(w, high), truncated (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    training"). The others: w, of mis_sequence the product of its sequence at each token; dropped tokens have 0.
    """
    sampled_T = targets.sampled_T
    log_w_T = bounded(torch.where(sampled_T, old_logp_T - targets.engine_logp_T, 0.0)).detach()
    is_clipped_T = torch.zeros_like(sampled_T)
    if targets.dropped_T is None:
        is_dropped_T = is_clipped_T
    else:
        is_dropped_T = targets.dropped_T
    weight_T = log_w_T.exp()
    if hyperparameters.rollout_correction == "tis":
        _, high = bounds(hyperparameters)
        is_clipped_T = weight_T > high
        weight_T = weight_T.clamp(max=high)
    elif hyperparameters.rollout_correction == "mis_sequence":
        weight_T = bounded(segment_sum(log_w_T, sampled_T, targets.sequence_T)).exp()
    weight_T = torch.where(is_dropped_T, 0.0, weight_T)
    values = {KL: k3(log_w_T), WEIGHT: weight_T, CLIPPED: is_clipped_T, MASKED: is_dropped_T}
    own_T = torch.where(sampled_T, weight_T, 0.0)
    stats = {
        ESS: parts(own_T.sum(), (own_T**2).sum(), sampled_T.sum()),
        **over_tokens(sampled_T, values),
    }
    of_age = {"fresh": sampled_T & ~targets.is_stale_T, "stale": sampled_T & targets.is_stale_T}
    for age, names in _BY_AGE.items():
        stats |= over_tokens(
            of_age[age], {names[statistic]: value_T for statistic, value_T in values.items()}
        )
    return weight_T, stats


def bounds(hyperparameters: Hyperparameters) -> tuple[float, float]:
    """(lowest, highest) ratio that is kept: the hyperparameters', else ROLLOUT_CORRECTION_BOUNDS.

    Only where the correction is not off.
    """
    low, high = ROLLOUT_CORRECTION_BOUNDS[hyperparameters.rollout_correction]
    if hyperparameters.rollout_correction_low is not None:
        low = hyperparameters.rollout_correction_low
    if hyperparameters.rollout_correction_high is not None:
        high = hyperparameters.rollout_correction_high
    return low, high
