"""Differentiable exchanges of a packed row's tokens between context- or tensor-parallel ranks."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


def gather_whole(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, ...] of every rank, concatenated in rank order, for a loss that every rank computes in full.

    The backward pass slices the gradient, without a sum.
    """
    return gather_from_sequence_parallel_region(
        share, tensor_parallel_output_grad=False, group=group
    )


def gather_row(share_L: Tensor, order_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """One value a token, gathered in the order of the row [T], for a loss that every rank computes in full."""
    if group.size() == 1:
        return share_L
    return gather_whole(share_L, group).index_select(0, order_T)


def gather_shared(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, ...] of every rank, concatenated in rank order, for ranks that use it differently.

    The backward pass reduce-scatters the gradients.
    """
    return gather_from_sequence_parallel_region(share, group=group)


def gather_keys(share: Tensor, order_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Keys or values [L, heads, d], gathered in the order of the row [T, heads, d]."""
    if group.size() == 1:
        return share
    return gather_shared(share, group).index_select(0, order_T)


def scatter_heads(share_LHX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, H, X] of every rank -> [T, H / ranks, X]: all tokens, rank by rank, of this rank's part of the heads."""
    by_part = share_LHX.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return all_to_all(group, by_part).flatten(0, 1)


def scatter_tokens(parts_TGX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `scatter_heads`: [T, H / ranks, X] -> [L, H, X]."""
    by_rank = parts_TGX.unflatten(0, (group.size(), -1)).contiguous()
    return all_to_all(group, by_rank).transpose(0, 1).flatten(1, 2)
