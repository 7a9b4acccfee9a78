"""Weights of another model of the same shape, which wait in host memory for their turn on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

Params = Mapping[str, torch.Tensor]


def room_for(params: Params) -> dict[str, torch.Tensor]:
    """Host memory for as much, contents undefined; pinned where the weights are on a GPU."""
    return {
        name: torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda) for name, param in params.items()
    }


@contextmanager
def in_place_of(params: Params, waiting: Params) -> Iterator[None]:
    """Inside, `params` hold what waits, in their own memory, and the host holds theirs; one tensor moves at a time."""
    _swap(params, waiting)
    try:
        yield
    finally:
        _swap(params, waiting)


@torch.no_grad()
def _swap(params: Params, waiting: Params) -> None:
    for name, param in params.items():
        mine = param.clone()
        param.copy_(waiting[name])
        waiting[name].copy_(mine)
