"""The sum of an engine rank's experts in torch, for SGLang on CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sum_local_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_experts: int,
    compute: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """x [tokens, hidden], weights and ids [tokens, top-k]; ids are of this rank's experts, or -1.

    compute: an expert and its tokens [T, hidden] to its outputs. The experts are summed in order, whether or not a
    batch has tokens for the experts of other ranks, so that the order of addition is always the same.
    """
    total = torch.zeros_like(x)
    for expert in range(num_experts):
        token, choice = torch.where(ids == expert)
        out = compute(expert, x[token])
        total.index_add_(0, token, (out * weights[token, choice, None]).to(x.dtype))
    return total
