"""Differentiable all-gathers of a packed row's tokens over context- or tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _GatherWhole(torch.autograd.Function):
    """All-gather for a loss that every rank computes in full: the backward pass slices the gradient, without a sum."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank = group.rank()
        ctx.length = len(share)
        return _all_gather(share, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        start = ctx.rank * ctx.length
        return gradients[0][start : start + ctx.length].contiguous(), None


class _GatherShared(torch.autograd.Function):
    """All-gather for tensors that each rank uses differently: the backward pass reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(share, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        share = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(share, gradient, group=ctx.group)
        return share, None


def _all_gather(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = share.new_empty(group.size() * len(share), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
    return whole


def gather_whole(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[L, ...] of every rank, concatenated in rank order, for a loss that every rank computes in full."""
    # type: ignore[return-value]
    if group.size() == 1:
        return share
    return _GatherWhole.apply(share, group)


def gather_row(
    share_L: torch.Tensor, order_T: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """One value a token, gathered in the order of the row [T], for a loss that every rank computes in full."""
    if group.size() == 1:
        return share_L
    return gather_whole(share_L, group).index_select(0, order_T)


def gather_shared(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[L, ...] of every rank, concatenated in rank order, for ranks that use it differently."""
    # type: ignore[return-value]
    if group.size() == 1:
        return share
    return _GatherShared.apply(share, group)


def gather_keys(
    share: torch.Tensor, order_T: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Keys or values [L, heads, d], gathered in the order of the row [T, heads, d]."""
    if group.size() == 1:
        return share
    return gather_shared(share, group).index_select(0, order_T)
