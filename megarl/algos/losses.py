"""Losses on one packed row of T tokens. Each returns a sum; the trainer divides once, by the global count."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from megarl.algos.ratios import bounded, k3
from megarl.algos.rollout_correction import weights
from megarl.algos.segments import segment_sum
from megarl.algos.statistics import CLIPPED, MAX, TOKENS, Reduction, Statistic, over_tokens, parts
from megarl.algos.surrogates import Surrogate
from megarl.algos.targets import Targets
from megarl.types import Estimator, Hyperparameters

LossResult = tuple[Tensor, dict[Statistic, Tensor]]

# |engine - trainer| logprob, of tokens that the policy itself sampled
DIFF = Statistic("rollout/logprob_diff_mean")
DIFF_MAX = Statistic("rollout/logprob_diff_max", MAX)
# KL(engine | trainer) of them, and the share with a ratio trainer / engine beyond FAR_RATIOS
ENGINE_KL = Statistic("rollout/logprob_kl")
FAR = Statistic("rollout/ratio_far_share")
FAR_RATIOS = (0.5, 2.0)
OLD_KL = Statistic("old_kl")  # the k3 estimate of KL(old | policy)
ENTROPY = Statistic("entropy")
MOST_TURNS = 8  # of which each has a gap of its own; the later ones have one together
TURN_DIFFS = tuple(
    Statistic(f"rollout/logprob_diff_turn_{name}") for name in (*range(1, MOST_TURNS + 1), "later")
)  # GAP by the turn of an episode
# what compares the engine with the trainer
ENGINE_DIFFS = frozenset((DIFF, DIFF_MAX, ENGINE_KL, FAR, *TURN_DIFFS))
REFERENCE_KL = Statistic("reference_kl")  # the k3 estimate of KL(policy | reference)
RIGHT = Statistic("right")  # tokens of responses whose reward's sign is that of the outcome
REWARD = Statistic("reward_mean")
VALUE = Statistic("value_mean")
RETURN = Statistic("return_mean")


def _explained(
    total: float, square: float, error: float, error_square: float, tokens: float
) -> float | None:
    """1 - Var(return - value) / Var(return) from sums over tokens; 0 where all returns are the same."""
    variance = square / tokens - (total / tokens) ** 2
    unexplained = error_square / tokens - (error / tokens) ** 2
    if variance > 1e-12:
        return 1.0 - unexplained / variance
    return 0.0


# of the returns, by the values before
EXPLAINED_VARIANCE = Statistic("explained_variance", Reduction(_explained))


def policy_loss(
    surrogate: Surrogate,
    logp_T: Tensor,
    entropy_T: Tensor,
    old_logp_T: Tensor,
    targets: Targets,
    hyperparameters: Hyperparameters,
) -> LossResult:
    """Weighted sum over the masked tokens of the surrogate, corrected for the engine's other logprobs, and of the
    penalties.

    + kl_coefficient x KL(policy | reference) - entropy_coefficient x entropy; and of -log p by weights of its own
    (of the correct samples: VAPO, arXiv 2504.05118, eq. 10). old_logp_T: of the policy before the step, around which
    the ratio is clipped; a token whose log-ratio leaves +-20 has no gradient by it. What earlier policies sampled is
    corrected by the rollout correction (decoupled PPO, arXiv 2505.24298); where that is off, the ratio of these tokens
    is to the engine's own probabilities, as is that of all tokens where these are the old ones. Tokens that the rollout
    correction drops are out of the mask, and in the statistics of the engine.
    """
    mask_T = targets.loss_mask_T
    sampled_T = targets.sampled_T
    if hyperparameters.old_logprobs == "engine":
        proximal_T = targets.engine_logp_T
    elif hyperparameters.rollout_correction == "off":
        proximal_T = torch.where(targets.is_stale_T, targets.engine_logp_T, old_logp_T)
    else:
        proximal_T = old_logp_T
    # Unmasked tokens get 0 before anything is multiplied, so that no inf * 0 reaches the gradient.
    logp_T = torch.where(mask_T, logp_T, 0.0)
    old_logp_T = torch.where(sampled_T, old_logp_T, 0.0)
    log_ratio_T = bounded(torch.where(mask_T, logp_T - proximal_T, 0.0))
    loss_T, surrogate_stats = surrogate(logp_T, log_ratio_T, targets, hyperparameters)
    if hyperparameters.rollout_correction == "off":
        stats = {}
    else:
        weight_T, stats = weights(old_logp_T, targets, hyperparameters)
        loss_T = loss_T * weight_T
    coefficient = hyperparameters.kl_coefficient
    if coefficient and not hyperparameters.pays_kl and targets.reference_logp_T is not None:
        loss_T = loss_T + coefficient * kl_T(
            logp_T, targets.reference_logp_T, hyperparameters.kl_estimator
        )
    if hyperparameters.entropy_coefficient:
        loss_T = loss_T - hyperparameters.entropy_coefficient * entropy_T
    with torch.no_grad():
        is_fresh_T = sampled_T & ~targets.is_stale_T  # elsewhere the policies differ, too
        log_w_T = bounded(torch.where(is_fresh_T, old_logp_T - targets.engine_logp_T, 0.0))
        stats |= over_tokens(is_fresh_T, _engine_diffs(log_w_T))
        stats |= over_tokens(mask_T, {OLD_KL: k3(log_ratio_T), **surrogate_stats})
        stats[TOKENS] = mask_T.sum()
    loss = (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum()
    if hyperparameters.positive_nll:
        loss = loss - (logp_T * targets.nll_weight_T).sum()
    return loss, stats


def _engine_diffs(log_w_T: Tensor) -> dict[Statistic, Tensor]:
    """What is reported of trainer / engine, of each token's log-ratio, whatever corrects the loss for it."""
    diff_T = log_w_T.abs()
    low, high = FAR_RATIOS
    is_far_T = (log_w_T < math.log(low)) | (log_w_T > math.log(high))
    return {DIFF: diff_T, DIFF_MAX: diff_T, ENGINE_KL: k3(log_w_T), FAR: is_far_T}


def policy_statistics(
    logp_T: Tensor, entropy_T: Tensor, targets: Targets
) -> dict[Statistic, Tensor]:
    """What every update of a policy reports, whatever its loss."""
    values = {ENTROPY: entropy_T}
    if targets.reference_logp_T is not None:
        values[REFERENCE_KL] = kl_T(logp_T.detach(), targets.reference_logp_T, "k3")
    return over_tokens(targets.sampled_T, values)


def turn_diffs(old_logp_T: Tensor, targets: Targets) -> dict[Statistic, Tensor]:
    """|engine - trainer| logprob by turns, of tokens that the policy itself sampled; of no episode: the first turn."""
    with torch.no_grad():
        is_fresh_T = targets.sampled_T & ~targets.is_stale_T
        if targets.turn_T is None:
            turn_T = torch.ones_like(targets.sequence_T)
        else:
            turn_T = targets.turn_T
        diff_T = torch.where(is_fresh_T, bounded(old_logp_T - targets.engine_logp_T).abs(), 0.0)
        parts_2T = torch.stack([diff_T, is_fresh_T.to(diff_T.dtype)]).double()
        parts_2N = parts_2T.new_zeros(2, len(TURN_DIFFS)).index_add(
            1, turn_T.clamp(1, len(TURN_DIFFS)) - 1, parts_2T
        )
    return dict(zip(TURN_DIFFS, parts_2N.T, strict=True))


def kl_T(logp_T: Tensor, reference_logp_T: Tensor, estimator: Estimator) -> Tensor:
    """Of each token, an estimate of KL(policy | reference) (Schulman, "Approximating KL divergence", 2020).

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, at most 10.
    """
    difference_T = reference_logp_T - logp_T
    if estimator == "k1":
        return -difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    return k3(difference_T)


def nll_loss(logp_T: Tensor, targets: Targets) -> LossResult:
    """Weighted sum of -log p over the masked tokens: supervised fine-tuning."""
    mask_T = targets.loss_mask_T
    return -(torch.where(mask_T, logp_T, 0.0) * targets.loss_weight_T).sum(), {TOKENS: mask_T.sum()}


def outcome_loss(logp_T: Tensor, targets: Targets, *, beta: float) -> LossResult:
    """Weighted sum of the cross-entropy between outcomes and sigmoid(reward) (PRIME, arXiv 2502.01456).

    A sequence's reward is beta x log(policy / reference), summed over its masked tokens, each of which adds its
    sequence's cross-entropy by its weight.
    """
    mask_T = targets.loss_mask_T
    assert targets.reference_logp_T is not None
    ratio_T = torch.where(mask_T, logp_T - targets.reference_logp_T, 0.0)
    reward_T = beta * segment_sum(ratio_T, mask_T, targets.sequence_T)
    loss_T = binary_cross_entropy_with_logits(reward_T, targets.outcome_T, reduction="none")
    stats = over_tokens(mask_T, {RIGHT: (reward_T.detach() > 0) == (targets.outcome_T > 0.5)})
    stats[REWARD] = parts(beta * ratio_T.detach().sum(), mask_T.sum())
    return (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum(), stats


def value_loss(value_T: Tensor, targets: Targets, *, value_clip: float | None) -> LossResult:
    """Weighted sum of (V - return)^2 / 2 over the masked tokens.

    With value_clip the larger of it and that of V within value_clip of the old value (PPO's code, arXiv 2005.12729).
    """
    mask_T = targets.loss_mask_T
    return_T = targets.return_T
    old_value_T = targets.old_value_T
    assert return_T is not None and old_value_T is not None
    loss_T = (value_T - return_T) ** 2 / 2
    is_clipped_T = torch.zeros_like(mask_T)
    if value_clip is not None:
        near_T = old_value_T + (value_T - old_value_T).clamp(-value_clip, value_clip)
        clipped_loss_T = (near_T - return_T) ** 2 / 2
        is_clipped_T = mask_T & (clipped_loss_T > loss_T)
        loss_T = torch.maximum(loss_T, clipped_loss_T)
    error_T = return_T - old_value_T
    moments = (return_T, return_T**2, error_T, error_T**2)
    stats = over_tokens(mask_T, {VALUE: value_T, RETURN: return_T, CLIPPED: is_clipped_T})
    stats[EXPLAINED_VARIANCE] = parts(
        *(torch.where(mask_T, one_T, 0.0).sum() for one_T in moments), mask_T.sum()
    )
    return (torch.where(mask_T, loss_T, 0.0) * targets.loss_weight_T).sum(), stats
