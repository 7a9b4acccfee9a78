"""The device, the collective backend, the store and the network interface; each is chosen here and nowhere else."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

# cpu: use no GPU; cuda: refuse to run on the CPU (megarl/cluster/visible_gpus.py)
DEVICE_VARIABLE = "MEGARL_DEVICE"
_USES_GPU = torch.cuda.is_available() and os.environ.get(DEVICE_VARIABLE) != "cpu"
DEVICE = "cuda" if _USES_GPU else "cpu"
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
LOOPBACK = "127.0.0.1"
# DeepEP takes ranks 8 n to 8 n + 7 of a group for one node with NVLink (NUM_MAX_NVL_PEERS), whatever hosts they are on.
DEEPEP_NODE_RANKS = 8


def gpu_name() -> str:
    """The GPU's product name; "" without a GPU."""
    if DEVICE == "cuda":
        return torch.cuda.get_device_name()
    return ""


def held_bytes() -> int:
    """Memory of this process: torch's allocated GPU memory; without a GPU, the resident set size."""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def gpu_memory() -> tuple[Mapping[str, int], int, int] | None:
    """Torch's `memory_stats` of this process, and the free and all bytes of its GPU; None without a GPU."""
    if DEVICE == "cuda":
        return torch.cuda.memory_stats(), *torch.cuda.mem_get_info()
    return None


def used_gpu_bytes() -> int:
    """Used memory of the GPU, over all processes and libraries; 0 without a GPU."""
    if DEVICE != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def empty_cache() -> None:
    """Return torch's cached blocks to the GPU, for the other processes on it."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


class Address(NamedTuple):
    """The address of a key-value store, through which processes of a run find each other."""

    host: str
    port: int


def is_loopback(host: str) -> bool:
    """Whether an IPv4 address is a loopback address."""
    return host.startswith("127.")


def use_loopback() -> None:
    """Keep gloo's and NCCL's own sockets on loopback, unless this process has called `use_network` before."""
    use_network(LOOPBACK)


def use_network(host: str) -> None:
    """Put gloo's and NCCL's own sockets on the interface that leads to `host`; call before the first process group.

    Variables that are already set stay: the user knows the cluster better.
    """
    interface = "lo" if is_loopback(host) else _interface_to(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # without the sign it is a prefix of names
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _interface_to(host: str) -> str:
    """The name of the interface that leads to `host`, which may be another address of this machine."""
    address = own_address(host)
    if is_loopback(address):
        return "lo"
    interfaces = psutil.net_if_addrs().items()
    return next(
        name for name, entries in interfaces if address in {entry.address for entry in entries}
    )


def own_address(host: str) -> str:
    """This machine's address on the interface that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket looks the route up and sends nothing
        return probe.getsockname()[0]


def use_sglang_nccl_settings() -> None:
    """Give NCCL the settings that SGLang gives it in engines, with which training ranks share communicators.

    Neither SGLang nor this function replaces a variable that is set, so the user's own values hold on both sides too.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def listening_socket(host: str = LOOPBACK) -> socket.socket:
    """A socket that listens on a free port of one of this machine's addresses, and on no other address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def host_store(timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """Serve a key-value store on one address; torch's own server would listen on every interface."""
    listener = listening_socket(host)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def address_of(store: TCPStore) -> Address:
    """The address that `join_store` takes."""
    return Address(store.host, store.port)


def join_store(address: Address, timeout_s: float) -> TCPStore:
    """Connect to a store that `host_store` serves."""
    return TCPStore(
        *address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
