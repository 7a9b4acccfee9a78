"""What losses read of a packed row, every tensor [T] and aligned with the logprobs."""

from __future__ import annotations

from typing import Protocol

import torch


class Targets(Protocol):
    """Of a policy. sequence_T numbers the sequences of the row from 0; padding may have the next number."""

    @property
    def loss_mask_T(self) -> torch.Tensor: ...
    @property
    def loss_weight_T(self) -> torch.Tensor: ...
    @property
    def advantage_T(self) -> torch.Tensor: ...
    @property
    def engine_logp_T(self) -> torch.Tensor: ...
    @property
    def nll_weight_T(self) -> torch.Tensor: ...
    @property
    def reference_logp_T(self) -> torch.Tensor | None: ...
    @property
    def sequence_T(self) -> torch.Tensor: ...


class OutcomeTargets(Protocol):
    """Of an implicit reward model. outcome_T: of the token's sequence, 1 where it is correct, else 0."""

    @property
    def loss_mask_T(self) -> torch.Tensor: ...
    @property
    def loss_weight_T(self) -> torch.Tensor: ...
    @property
    def outcome_T(self) -> torch.Tensor: ...
    @property
    def reference_logp_T(self) -> torch.Tensor | None: ...
    @property
    def sequence_T(self) -> torch.Tensor: ...


class ValueTargets(Protocol):
    """Of a critic."""

    @property
    def loss_mask_T(self) -> torch.Tensor: ...
    @property
    def loss_weight_T(self) -> torch.Tensor: ...
    @property
    def return_T(self) -> torch.Tensor: ...
    @property
    def old_value_T(self) -> torch.Tensor: ...
