"""Which device, which collective backend, which store: each is chosen here and nowhere else."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
LOOPBACK = "127.0.0.1"


def name() -> str:
    """Of the GPU, as its maker calls it; "" without one."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else ""


def held_bytes() -> int:
    """Memory that this process holds: torch's tensors on the GPU; without one, what is resident of the process."""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def use_loopback() -> None:
    """Keep gloo's own sockets on loopback; call before the first process group of a process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def loopback_socket() -> socket.socket:
    """A listening socket on a free port of 127.0.0.1."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    return listener


def host_store(timeout_s: float) -> TCPStore:
    """Serve a key-value store on loopback; torch's own server would listen on every interface."""
    listener = loopback_socket()
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, timeout_s: float) -> TCPStore:
    """Connect to a store that `host_store` serves on this machine."""
    return TCPStore(
        LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
