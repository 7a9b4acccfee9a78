"""Which device, which collective backend, which store and which network: each is chosen here and nowhere else."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import NamedTuple

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

CHOICE = "MEGARL_DEVICE"  # cpu: use no GPU, whatever is there; cuda: never the CPU (megarl/cluster/visible_gpus.py)
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get(CHOICE) != "cpu" else "cpu"
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


def taken_bytes() -> int:
    """Memory of the GPU that whoever holds it has, libraries' own too; 0 without one."""
    if DEVICE != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def free_unused() -> None:
    """Give back to the GPU what torch keeps of freed tensors: another process on it looks for room."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


class Address(NamedTuple):
    """Where processes of a run meet."""

    host: str
    port: int


def is_loopback(host: str) -> bool:
    """Whether an IPv4 address is of this machine alone."""
    return host.startswith("127.")


def use_loopback() -> None:
    """Keep gloo's and NCCL's own sockets on loopback, unless `use_network` said otherwise in this process before."""
    use_network(LOOPBACK)


def use_network(host: str) -> None:
    """Put gloo's and NCCL's own sockets on the interface that leads to `host`; call before the first process group.

    What the environment says of them stays: the user knows the cluster better.
    """
    interface = "lo" if is_loopback(host) else _interface_to(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without the sign it also takes names that begin so


def own_address(host: str) -> str:
    """This machine's address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: looks the route up and sends nothing
        return probe.getsockname()[0]


def _interface_to(host: str) -> str:
    own = own_address(host)
    names = [name for name, found in psutil.net_if_addrs().items() if own in {one.address for one in found}]
    return "lo" if is_loopback(own) else names[0]


def agree_on_nccl() -> None:
    """Give NCCL the settings that SGLang gives it in engines; training ranks share communicators with them.

    SGLang leaves alone what the environment says, so that a user's own values hold on both sides too.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def listening_socket(host: str = LOOPBACK) -> socket.socket:
    """Listens on a free port of one of this machine's addresses, and on no other address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def host_store(timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """Serve a key-value store on one address; torch's own server would listen on every interface."""
    listener = listening_socket(host)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def address_of(store: TCPStore) -> Address:
    """For `join_store`."""
    return Address(store.host, store.port)


def join_store(address: Address, timeout_s: float) -> TCPStore:
    """Connect to a store that `host_store` serves."""
    host, port = address
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
