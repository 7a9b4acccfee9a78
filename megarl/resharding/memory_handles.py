"""Sharing parameters with another process of the same GPU, which maps the same memory without a copy.

CPU: a storage moves in place into a shared-memory file that is already unlinked; the other process opens it through
/proc/<pid>/fd, so that no file is left however either process ends. CUDA: the storage's IPC handle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.types import UserError
from megarl.types.tensors import NamedTensors

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class CpuStorage:
    """An open shared-memory file of process `pid`."""

    pid: int
    fd: int
    num_bytes: int


@dataclass(frozen=True)
class CudaStorage:
    """The result of `UntypedStorage._share_cuda_` without the device; bytes as hex."""

    arguments: tuple[
        str | int | bool, ...
    ]  # of `UntypedStorage._new_shared_cuda`, after the device


@dataclass(frozen=True)
class ParamView:
    """A parameter inside a storage; offset and stride count elements, dtype is torch's name ("float32")."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SourceHandles:
    """The shared parameters of one training rank; many parameters are in one storage (Megatron's flat buffers)."""

    storages: tuple[CpuStorage | CudaStorage, ...]
    params: dict[str, ParamView]


def share_params(params: NamedTensors) -> SourceHandles:
    """Make `params` mappable by another process; for this process they do not change. They must outlive the mapping.

    Raises UserError when the machine's shared memory is too small.
    """
    index: dict[int, int] = {}
    handles: list[CpuStorage | CudaStorage] = []
    views: dict[str, ParamView] = {}
    for name, param in params.items():
        storage = param.untyped_storage()
        if storage._cdata not in index:
            index[storage._cdata] = len(handles)
            handles.append(_share_storage(storage))
        views[name] = ParamView(
            index[storage._cdata],
            int(param.storage_offset()),
            tuple(param.shape),
            tuple(param.stride()),
            str(param.dtype).removeprefix("torch."),
        )
    return SourceHandles(tuple(handles), views)


def _share_storage(storage: torch.UntypedStorage) -> CpuStorage | CudaStorage:
    if storage.device.type == "cpu":
        _check_shared_memory(storage)
        fd, num_bytes = storage._share_fd_cpu_()
        return CpuStorage(os.getpid(), fd, num_bytes)
    _, *shared = storage._share_cuda_()
    return CudaStorage(tuple(part.hex() if isinstance(part, bytes) else part for part in shared))


def _check_shared_memory(storage: torch.UntypedStorage) -> None:
    """Check the free space of the file system: writing past its limit would kill the process with SIGBUS."""
    usage = os.statvfs(SHARED_MEMORY)
    free_bytes = usage.f_bavail * usage.f_frsize
    if not storage.is_shared() and storage.nbytes() > free_bytes:
        problem = f"{free_bytes} bytes free, the weights of one rank need {storage.nbytes()}"
        raise UserError(
            SHARED_MEMORY, problem, "make it larger (docker: --shm-size) or train a smaller model"
        )


def map_params(handles: SourceHandles) -> dict[str, Tensor]:
    """Map the parameters of another process of this machine (on CUDA of this GPU): name -> tensor on that memory.

    Raises RuntimeError when the other process has ended.
    """
    storages = [_map_storage(handle) for handle in handles.storages]
    params_by_name = {}
    for name, view in handles.params.items():
        storage = storages[view.storage]
        empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
        params_by_name[name] = empty.set_(storage, view.offset, view.shape, view.stride)
    return params_by_name


def _map_storage(handle: CpuStorage | CudaStorage) -> torch.UntypedStorage:
    if isinstance(handle, CudaStorage):
        arguments = (
            bytes.fromhex(part) if isinstance(part, str) else part for part in handle.arguments
        )
        return torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *arguments)
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"cannot map the weights of training process {handle.pid} ({path}: {error})"
        ) from error
    try:
        return torch.UntypedStorage._new_shared_fd_cpu(fd, handle.num_bytes)  # pyright: ignore
    finally:
        os.close(fd)
