"""Weights that wait in host memory for their turn on the device: a model's own, or of another of the same shape."""

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


PutAway = list[tuple[torch.UntypedStorage, torch.Tensor]]


def put_away(params: Params) -> PutAway:
    """Copy the parameters to the host and give their own memory back; every view of it stays one."""
    away: PutAway = []
    for storage in {param.untyped_storage().data_ptr(): param.untyped_storage() for param in params.values()}.values():
        content = _bytes(storage)
        waiting = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=content.is_cuda)
        away.append((storage, waiting.copy_(content)))
        storage.resize_(0)
    return away


def put_back(away: PutAway) -> None:
    """Undo put_away."""
    for storage, waiting in away:
        storage.resize_(waiting.numel())
        _bytes(storage).copy_(waiting)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
