"""Losses on one packed row of T tokens. Each returns a sum; the trainer divides once, by the global count."""

from __future__ import annotations

from typing import Protocol

import torch


class Targets(Protocol):
    """What a loss reads of a packed row, every tensor [T] and aligned with the logprobs."""

    @property
    def loss_mask_T(self) -> torch.Tensor: ...
    @property
    def loss_weight_T(self) -> torch.Tensor: ...
    @property
    def advantage_T(self) -> torch.Tensor: ...
    @property
    def engine_logp_T(self) -> torch.Tensor: ...


class ValueTargets(Protocol):
    """What the critic's loss reads."""

    @property
    def loss_mask_T(self) -> torch.Tensor: ...
    @property
    def loss_weight_T(self) -> torch.Tensor: ...
    @property
    def return_T(self) -> torch.Tensor: ...
    @property
    def old_value_T(self) -> torch.Tensor: ...


LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]


def clipped_policy_loss(
    logp_T: torch.Tensor, old_logp_T: torch.Tensor, targets: Targets, *, clip_low: float, clip_high: float
) -> LossResult:
    """Weighted sum of -min(r A, clip(r, 1 - low, 1 + high) A) over the masked tokens (PPO, arXiv 1707.06347, eq. 7).

    Statistics: sums over the masked tokens, and `_max` for a maximum; `gap` is |engine - trainer| logprob.
    """
    mask_T = targets.loss_mask_T
    # Unmasked tokens get log-ratio 0 before exp, so that no inf * 0 reaches the gradient.
    log_ratio_T = torch.where(mask_T, logp_T - old_logp_T, 0.0)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantage_T = targets.advantage_T
    loss_T = torch.where(mask_T, -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T), 0.0)
    with torch.no_grad():
        gap_T = torch.where(mask_T, (old_logp_T - targets.engine_logp_T).abs(), 0.0)
        is_clipped_T = mask_T & (clipped_T * advantage_T < ratio_T * advantage_T)
        stats = {
            "tokens": mask_T.sum(),
            "gap": gap_T.sum(),
            "gap_max": gap_T.max(),
            "clipped": is_clipped_T.sum(),
            "old_kl": torch.where(mask_T, ratio_T - 1.0 - log_ratio_T, 0.0).sum(),
        }
    return (loss_T * targets.loss_weight_T).sum(), stats


def nll_loss(logp_T: torch.Tensor, old_logp_T: torch.Tensor, targets: Targets) -> LossResult:
    """Weighted sum of -log p over the masked tokens: supervised fine-tuning."""
    mask_T = targets.loss_mask_T
    return -(torch.where(mask_T, logp_T, 0.0) * targets.loss_weight_T).sum(), {"tokens": mask_T.sum()}


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
