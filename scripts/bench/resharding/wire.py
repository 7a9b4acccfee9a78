"""Bytes on the wire and memory, as the kernel counts them: outside of what is measured, and alike for every method."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.types import UserError

IN_NAMESPACE = "MEGARL_BENCH_NAMESPACE"
BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
SET_FLAGS, UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
PEAK_RESET = "5"  # what clear_refs takes for "forget the peak of the resident set"

Address = tuple[str, int]


class Socket(NamedTuple):
    """One end of a TCP connection and the payload bytes that it has received so far."""

    local: Address
    peer: Address
    received: int


def own_sockets() -> list[Socket]:
    """Every connected TCP socket of this process."""
    sockets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    received = struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
                    sockets.append(
                        Socket(connection.getsockname(), connection.getpeername(), received)
                    )
        except OSError:  # closed meanwhile, or listening
            continue
    return sockets


class Traffic(NamedTuple):
    """received[rank][peer]: payload bytes between ranks; control: what ranks received from anyone else."""

    received: list[list[int]]
    control: int


def traffic(before: Sequence[Sequence[Socket]], after: Sequence[Sequence[Socket]]) -> Traffic:
    """What each rank received between two looks at the sockets of all ranks."""
    owner = {
        (connection.local, connection.peer): rank
        for rank, sockets in enumerate(after)
        for connection in sockets
    }
    already = {
        (connection.local, connection.peer): connection.received
        for sockets in before
        for connection in sockets
    }
    received, control = [[0] * len(after) for _ in after], 0
    for rank, sockets in enumerate(after):
        for connection in sockets:
            num_bytes = connection.received - already.get((connection.local, connection.peer), 0)
            sender = owner.get((connection.peer, connection.local))
            if sender is None:
                control += num_bytes
            else:
                received[rank][sender] += num_bytes
    return Traffic(received, control)


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this namespace has carried, headers and acknowledgements included."""
    line = re.search(r"lo:\s*(\d+)", Path("/proc/net/dev").read_text())
    return int(line.group(1)) if line else 0


def enter_namespace() -> bool:
    """Restart the command in a network namespace of its own; False where the machine does not permit one."""
    if os.environ.get(IN_NAMESPACE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
        return True
    command = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*command, "true"], capture_output=True).returncode
    ):
        os.execvpe(
            command[0], [*command, sys.executable, *sys.argv], {**os.environ, IN_NAMESPACE: "1"}
        )
    return False


def throttle(megabits: int) -> None:
    """Let the loopback interface carry this much a second, all processes together. Raises UserError."""
    shape = f"qdisc replace dev lo root tbf rate {megabits}mbit burst 1mb limit 256mb"
    refusal = "tc is not installed"
    if shutil.which("tc"):
        done = subprocess.run(["tc", *shape.split()], capture_output=True, text=True)
        if not done.returncode:
            return
        refusal = done.stderr.strip().replace("\n", " ")
    raise UserError("--throttle", f"the loopback cannot be throttled ({refusal})", "run without it")


def _status(field: str) -> int:
    """Bytes of one line of /proc/self/status."""
    line = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None, field
    return int(line.group(1)) * 1024


def begin_memory() -> int:
    """Give free memory back, start the peak anew; returns the resident bytes to compare the peak with."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(PEAK_RESET)
    return _status("VmRSS")


def peak_memory() -> int:
    """The most resident bytes since `begin_memory`."""
    return _status("VmHWM")
