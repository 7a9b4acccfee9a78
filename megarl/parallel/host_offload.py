"""Weights in host memory: a model's own while another model uses the GPU, or a second set such as the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megarl.types.tensors import NamedTensors

Params = NamedTensors


def host_buffers_like(params: Params) -> dict[str, Tensor]:
    """Uninitialised host tensors of the parameters' shapes; pinned where the parameters are on a GPU."""
    return {
        name: torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda)
        for name, param in params.items()
    }


@contextmanager
def swapped_in(params: Params, on_host: Params) -> Iterator[None]:
    """Exchange the contents of `params` and `on_host` inside the block, one tensor at a time."""
    _swap(params, on_host)
    try:
        yield
    finally:
        _swap(params, on_host)


@torch.no_grad()
def _swap(params: Params, on_host: Params) -> None:
    for name, param in params.items():
        before = param.clone()
        param.copy_(on_host[name])
        on_host[name].copy_(before)


Offloaded = list[tuple[torch.UntypedStorage, Tensor]]


def offload_params(params: Params) -> Offloaded:
    """Copy the parameters to the host and free their memory; views of their storages stay valid views."""
    offloaded: Offloaded = []
    for storage in {
        param.untyped_storage().data_ptr(): param.untyped_storage() for param in params.values()
    }.values():
        content = _bytes(storage)
        on_host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=content.is_cuda)
        offloaded.append((storage, on_host.copy_(content)))
        storage.resize_(0)
    return offloaded


def onload_params(offloaded: Offloaded) -> None:
    """Undo offload_params."""
    for storage, on_host in offloaded:
        storage.resize_(on_host.numel())
        _bytes(storage).copy_(on_host)


def contents(tensor: Tensor, offloaded: Offloaded) -> Tensor:
    """The tensor, or a view of its content on the host while its memory is freed."""
    own = tensor.untyped_storage()
    for storage, on_host in offloaded:
        if storage._cdata == own._cdata:
            whole = on_host.view(tensor.dtype)
            return whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return tensor.detach()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
