"""What a mismatch correction leaves of a packed row, as a rank decides it before the loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.algos import rollout_correction
from megarl.algos.targets import Targets
from megarl.types import Hyperparameters


def kept(old_logp_T: torch.Tensor, targets: Targets, hparams: Hyperparameters) -> Targets:
    """The targets with the dropped tokens out of the mask, where the correction drops any."""
    if not rollout_correction.drops(hparams):
        return targets
    mask_T = targets.loss_mask_T
    dropped_T = rollout_correction.dropped(
        old_logp_T, targets.engine_logp_T, mask_T, targets.sequence_T, hparams
    )
    return replace(targets, loss_mask_T=mask_T & ~dropped_T, dropped_T=dropped_T)
