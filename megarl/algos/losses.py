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
