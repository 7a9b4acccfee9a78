"""Sums over the sequences of a packed row."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """At every token the sum over the masked tokens of its sequence [T]; sequence_T: the sequences' numbers."""
    return _sums(torch.where(mask_T, values_T, 0.0), sequence_T)[sequence_T]


def segment_mean(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """The same of the mean; 0 in a sequence without masked tokens."""
    counts = _sums(mask_T.to(values_T.dtype), sequence_T).clamp(min=1)
    return (_sums(torch.where(mask_T, values_T, 0.0), sequence_T) / counts)[sequence_T]


def _sums(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    count = int(sequence_T.max()) + 1
    # One token after the other in float32, a sum of 100,000 would be wrong in its fourth digit.
    sums = torch.zeros(count, dtype=torch.float64, device=values_T.device).index_add(
        0, sequence_T, values_T.double()
    )
    return sums.to(values_T.dtype)
