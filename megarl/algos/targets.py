"""What losses read of a packed row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What losses read, every tensor [T] and aligned with the logprobs: entry t is about the token that t predicts.

    The last position of every sequence predicts nothing: it is masked, as is the padding, and as are sampled tokens
    that a rollout correction drops (by `rollout_correction.dropped`, before the loss). Only a critic has returns and
    values from before the step's updates.
    """

    loss_mask_T: Tensor
    loss_weight_T: Tensor
    advantage_T: Tensor
    outcome_T: Tensor  # of the token's sequence: 1 where it is correct, else 0
    engine_logp_T: Tensor
    nll_weight_T: Tensor
    is_stale_T: Tensor
    # int64, the sample of each token, from 0; the number of sequences for padding
    sequence_T: Tensor
    # int64, of episodes: the turn of each token that is trained on, from 1
    turn_T: Tensor | None = None
    dropped_T: Tensor | None = None  # sampled tokens that are out of the mask; None: no token
    reference_logp_T: Tensor | None = None
    return_T: Tensor | None = None
    old_value_T: Tensor | None = None

    @property
    def sampled_T(self) -> Tensor:
        """The tokens that the model sampled, whether the loss keeps them or not."""
        if self.dropped_T is None:
            return self.loss_mask_T
        return self.loss_mask_T | self.dropped_T
