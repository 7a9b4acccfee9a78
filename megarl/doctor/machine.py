"""The facts of a machine other than its GPUs and packages: memory, limits, disks, ports, RDMA cards. Linux."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megarl.cluster.topology import SYSFS, placement_among, placement_errors
from megarl.disk import existing_folder
from megarl.doctor.facts import UNLIMITED, Folder, Nic, Port, ProcessLimits

# to measure a disk's speed: enough to hide its latency, little enough for any disk
_WRITTEN_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**22
_SPARE_BYTES = 4 * _WRITTEN_BYTES  # a disk with less free space is not measured
_CGROUP = Path("/sys/fs/cgroup")
_INHERITED = (
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "SGLANG_",
    "RAY_EXPERIMENTAL_",
    "RAY_AUTH_MODE",
    "OMP_NUM_THREADS",
    "HF_HOME",
)
# Ray sets the first for each process; megarl sets the others by the node's own network.
_OWN = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_RATE = re.compile(r"([\d.]+)\s*Gb/sec")


def limits() -> ProcessLimits:
    """The soft limits of this process, and those of its container."""
    return ProcessLimits(
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        num_processes=_least(
            resource.getrlimit(resource.RLIMIT_NPROC)[0], _cgroup_number("pids.max")
        ),
    )


def host_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of the host, or the container's limit if that is less."""
    return _least(psutil.virtual_memory().total, _cgroup_number("memory.max", cgroup))


def disk_bytes(path: Path) -> tuple[int, int]:
    """(total bytes, bytes free for this user) of the file system of a path; (0, 0) where the path does not exist."""
    with suppress(OSError):
        filesystem = os.statvfs(path)
        return filesystem.f_frsize * filesystem.f_blocks, filesystem.f_frsize * filesystem.f_bavail
    return 0, 0


def folder(path: Path, purpose: str, *, is_written: bool, shared_name: str = "") -> Folder:
    """The facts of a folder that a run reads, or writes and makes if necessary.

    shared_name: a file that the first node has written there, to find out whether this node sees it.
    """
    path = path.absolute()
    existing = existing_folder(path)
    if not is_written and existing != path:
        return Folder(str(path), purpose, exists=False, is_written=False)
    total, free = disk_bytes(existing)
    error, speed = _write(existing, free) if is_written else ("", None)
    status = os.statvfs(existing)
    return Folder(
        path=str(path),
        purpose=purpose,
        exists=existing == path,
        is_written=is_written,
        total_bytes=total,
        free_bytes=free,
        free_files=status.f_favail if status.f_files else None,
        file_system=_file_system(existing),
        error=error,
        write_bytes_per_s=speed,
        is_shared=(existing / shared_name).exists() if shared_name else None,
    )


def _write(path: Path, free: int) -> tuple[str, float | None]:
    """(why no file can be written or "", bytes written per second or None where the disk is nearly full)."""
    size = _WRITTEN_BYTES if free > _SPARE_BYTES else 1
    chunk = os.urandom(min(size, _CHUNK_BYTES))  # some file systems compress
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            start = time.monotonic()
            for _ in range(max(1, size // _CHUNK_BYTES)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - start
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no space left", None
        return error.strerror or str(error), None
    return "", size / max(seconds, 1e-9) if size > 1 else None


def port(number: int, *, is_needed: bool = True) -> Port:
    """Whether a process listens on a port, and which, as far as this user may see."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # closed connections do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))  # without listening
            return Port(number, is_needed=is_needed)
        except OSError as error:
            return Port(number, _listener(number) or error.strerror or str(error), is_needed)


def _listener(number: int) -> str:
    """The process that listens on a port; "" where this user may not see it."""
    with suppress(psutil.Error, PermissionError):
        for socket_ in psutil.net_connections(kind="tcp"):
            listens = (
                socket_.status == psutil.CONN_LISTEN
                and socket_.laddr
                and socket_.laddr.port == number
            )
            if listens and socket_.pid:
                return f"{psutil.Process(socket_.pid).name()} (pid {socket_.pid})"
    return ""


def nics(root: Path = SYSFS) -> list[Nic]:
    """Every port of every card, by name."""
    cards = (root / "class/infiniband").glob("*")
    by_name = sorted(cards, key=lambda card: (len(card.name), card.name))
    return [
        _nic(card.name, port)
        for card in by_name
        for port in sorted((card / "ports").glob("[0-9]*"))
    ]


def gpu_nics(
    gpus: Sequence[str], address: str, root: Path = SYSFS
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the card that each GPU of the node sends through, problems that a run's own check reports).

    The problems are cards that several GPUs share, or that are on another socket. gpus: PCI addresses, of which some
    may be missing in /sys.
    """
    present = [gpu for gpu in gpus if (root / "bus/pci/devices" / gpu).exists()]
    placements = [placement_among(slot, present, address, root) for slot in range(len(present))]
    cards = {placed.gpu: placed.nic for placed in placements if placed.nic}
    return cards, tuple(error.problem for error in placement_errors(placements))


def _nic(name: str, port: Path) -> Nic:
    rate = _RATE.search(text_of(port / "rate"))
    return Nic(
        name=name,
        port=int(port.name),
        is_up="ACTIVE" in text_of(port / "state"),
        gbit_per_s=float(rate[1]) if rate else None,
        link_layer=text_of(port / "link_layer"),
    )


def text_of(file: Path) -> str:
    """A file of /sys or /proc; "" where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def environment(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The variables that libraries of a GPU cluster read, without secrets."""
    return {
        name: value
        for name, value in sorted(variables)
        if name.startswith(_INHERITED)
        and name not in _OWN
        and not any(word in name for word in _SECRET)
    }


def source_digest(package: Path) -> str:
    """A digest of all Python files of a package, by which an old copy on one node is noticed."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _least(*values: int) -> int:
    return min((value for value in values if value != UNLIMITED), default=UNLIMITED)


def _cgroup_number(name: str, root: Path = _CGROUP) -> int:
    """The tightest limit of this process's control groups and their parents; UNLIMITED where none has one."""
    cgroup = root
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        cgroup = root / next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    tightest = UNLIMITED
    for group in (cgroup, *cgroup.parents):
        if not group.is_relative_to(root):
            break
        with suppress(OSError, ValueError):
            tightest = _least(tightest, int((group / name).read_text()))
    return tightest


def _file_system(path: Path) -> str:
    """The type of the file system: that of the deepest mount point above `path`."""
    mounts = [
        mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)
    ]
    # the first of equal ones
    deepest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return deepest.fstype if deepest else ""
