"""Losses on one packed row of T tokens. Each returns a sum; the trainer divides once, by the global count."""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from megarl.algos.mismatch import weights
from megarl.algos.segments import segment_sum
from megarl.algos.surrogates import Surrogate
from megarl.algos.targets import OutcomeTargets, Targets, ValueTargets
from megarl.types import Estimator, Hyperparameters

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]


def policy_loss(
    surrogate: Surrogate,
    logp_T: torch.Tensor,
    entropy_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> LossResult:
    """Weighted sum over the masked tokens of the surrogate, corrected for the engine's mismatch, and of the penalties.

    + kl_coefficient x KL(policy | reference) - entropy_coefficient x entropy; and of -log p by weights of its own
    (of the correct samples: VAPO, arXiv 2504.05118, eq. 10). Statistics: sums over the masked tokens, and `_max` for a
    maximum; `gap` is |engine - trainer| logprob, `old_kl` the k3 estimate of KL(old | policy).
    """
    mask_T = targets.loss_mask_T
    # Unmasked tokens get 0 before anything is multiplied, so that no inf * 0 reaches the gradient.
    logp_T = torch.where(mask_T, logp_T, 0.0)
    old_logp_T = torch.where(mask_T, old_logp_T, 0.0)
    log_ratio_T = logp_T - old_logp_T
    loss_T, is_clipped_T = surrogate(logp_T, log_ratio_T, targets, hyperparameters)
    if hyperparameters.mismatch == "off":
        stats = {}
    else:
        weight_T, stats = weights(old_logp_T, targets, hyperparameters)
        loss_T = loss_T * weight_T
    coefficient = hyperparameters.kl_coefficient if hyperparameters.kl_place == "loss" else 0.0
    if coefficient and targets.reference_logp_T is not None:
        loss_T = loss_T + coefficient * kl_T(logp_T, targets.reference_logp_T, hyperparameters.kl_estimator)
    if hyperparameters.entropy_coefficient:
        loss_T = loss_T - hyperparameters.entropy_coefficient * entropy_T
    with torch.no_grad():
        gap_T = torch.where(mask_T, (old_logp_T - targets.engine_logp_T).abs(), 0.0)
        stats |= {
            "tokens": mask_T.sum(),
            "gap": gap_T.sum(),
            "gap_max": gap_T.max(),
            "clipped": (mask_T & is_clipped_T).sum(),
            "old_kl": torch.where(mask_T, log_ratio_T.exp() - 1.0 - log_ratio_T, 0.0).sum(),
        }
    loss = (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum()
    if hyperparameters.positive_nll:
        loss = loss - (logp_T * targets.nll_weight_T).sum()
    return loss, stats


def kl_T(logp_T: torch.Tensor, reference_logp_T: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Of each token, an estimate of KL(policy | reference) (Schulman, "Approximating KL divergence", 2020).

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    difference_T = reference_logp_T - logp_T
    if estimator == "k1":
        return -difference_T
    return difference_T**2 / 2 if estimator == "k2" else difference_T.exp() - 1.0 - difference_T


def nll_loss(logp_T: torch.Tensor, targets: Targets) -> LossResult:
    """Weighted sum of -log p over the masked tokens: supervised fine-tuning."""
    mask_T = targets.loss_mask_T
    return -(torch.where(mask_T, logp_T, 0.0) * targets.loss_weight_T).sum(), {"tokens": mask_T.sum()}


def outcome_loss(logp_T: torch.Tensor, targets: OutcomeTargets, *, scale: float) -> LossResult:
    """Weighted sum of the cross-entropy between outcomes and sigmoid(reward) (PRIME, arXiv 2502.01456).

    A sequence's reward is scale x log(policy / reference), summed over its masked tokens, each of which adds its
    sequence's cross-entropy by its weight. Statistics: sums over the masked tokens; `right`: the reward's sign is that
    of the outcome.
    """
    mask_T = targets.loss_mask_T
    assert targets.reference_logp_T is not None
    ratio_T = torch.where(mask_T, logp_T - targets.reference_logp_T, 0.0)
    reward_T = scale * segment_sum(ratio_T, mask_T, targets.sequence_T)
    loss_T = binary_cross_entropy_with_logits(reward_T, targets.outcome_T, reduction="none")
    is_right_T = mask_T & ((reward_T.detach() > 0) == (targets.outcome_T > 0.5))
    stats = {"tokens": mask_T.sum(), "right": is_right_T.sum(), "reward": scale * ratio_T.detach().sum()}
    return (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum(), stats


def value_loss(value_T: torch.Tensor, targets: ValueTargets, *, value_clip: float | None) -> LossResult:
    """Weighted sum of (V - return)^2 / 2 over the masked tokens.

    With value_clip the larger of it and that of V within value_clip of the old value (PPO's code, arXiv 2005.12729).
    Statistics: sums over the masked tokens; `error` is the old value's, return - V_old.
    """
    mask_T, return_T = targets.loss_mask_T, targets.return_T
    loss_T = (value_T - return_T) ** 2 / 2
    is_clipped_T = torch.zeros_like(mask_T)
    if value_clip is not None:
        near_T = targets.old_value_T + (value_T - targets.old_value_T).clamp(-value_clip, value_clip)
        clipped_loss_T = (near_T - return_T) ** 2 / 2
        is_clipped_T = mask_T & (clipped_loss_T > loss_T)
        loss_T = torch.maximum(loss_T, clipped_loss_T)
    with torch.no_grad():
        of_tokens = {
            "value": value_T,
            "return": return_T,
            "return_square": return_T**2,
            "error": return_T - targets.old_value_T,
            "error_square": (return_T - targets.old_value_T) ** 2,
        }
        stats = {name: torch.where(mask_T, values_T, 0.0).sum() for name, values_T in of_tokens.items()}
    loss = (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum()
    return loss, {"tokens": mask_T.sum(), "clipped": is_clipped_T.sum(), **stats}
