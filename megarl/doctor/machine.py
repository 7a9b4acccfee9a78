"""Facts of a machine that have nothing to do with its GPUs: memory, limits, disks, ports. Linux."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from megarl.doctor.facts import UNLIMITED, Folder, Port, ProcessLimits

SHM = Path("/dev/shm")
_WRITTEN_BYTES = 64 * 2**20  # to learn a disk's speed: enough for its latency not to count, little enough for any
_CHUNK_BYTES = 2**22
_SPARE_BYTES = 4 * _WRITTEN_BYTES  # a disk with less is nearly full, and is left alone
_CGROUP = Path("/sys/fs/cgroup")
_INHERITED = ("NCCL_", "GLOO_", "CUDA_", "SGLANG_", "RAY_EXPERIMENTAL_", "RAY_AUTH_MODE", "OMP_NUM_THREADS", "HF_HOME")
# Ray sets the first for each process, megarl the others by the node's own network.
_OWN = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def limits() -> ProcessLimits:
    """The soft limits of this process, and of the container around it."""
    return ProcessLimits(
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        num_files=_limit(resource.RLIMIT_NOFILE),
        num_processes=_least(_limit(resource.RLIMIT_NPROC), _cgroup_number("pids.max")),
    )


def host_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of the host, or of the container if that is less."""
    total = psutil.virtual_memory().total
    return _least(total, _cgroup_number("memory.max", cgroup))


def disk_bytes(path: Path) -> tuple[int, int]:
    """Total and free bytes for this user of the file system of a path; (0, 0) where it is not there."""
    with suppress(OSError):
        found = os.statvfs(path)
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    return 0, 0


def folder(path: Path, purpose: str, *, is_written: bool, shared_name: str = "") -> Folder:
    """A folder that is read, or written (or made, where its parent is there).

    shared_name: of a file that the first node has made there, to learn whether this node sees it.
    """
    path = path.absolute()
    there = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not is_written and there != path:
        return Folder(str(path), purpose, exists=False, is_written=False)
    total, free = disk_bytes(there)
    error, speed = _write(there, free) if is_written else ("", None)
    status = os.statvfs(there)
    return Folder(
        path=str(path),
        purpose=purpose,
        exists=there == path,
        is_written=is_written,
        total_bytes=total,
        free_bytes=free,
        free_files=status.f_favail if status.f_files else None,
        file_system=_file_system(there),
        error=error,
        write_bytes_per_s=speed,
        is_shared=(there / shared_name).exists() if shared_name else None,
    )


def _write(path: Path, free: int) -> tuple[str, float | None]:
    """Why no file can be written, and at which speed one is; None where the disk is nearly full."""
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
        return ("no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)), None
    return "", size / max(seconds, 1e-9) if size > 1 else None


def port(number: int, *, is_needed: bool = True) -> Port:
    """Whether something listens on a port, and what, as far as this user may see."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind(("0.0.0.0", number))  # and does not listen
            return Port(number, is_needed=is_needed)
        except OSError as error:
            return Port(number, _listener(number) or error.strerror or str(error), is_needed)


def _listener(number: int) -> str:
    """The process that listens on a port; "" where this user may not see it."""
    with suppress(psutil.Error, PermissionError):
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == number and one.pid:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    return ""


def environment(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What libraries of a GPU cluster read, and nothing else: an environment holds secrets."""
    told = [(name, value) for name, value in sorted(variables) if name.startswith(_INHERITED) and name not in _OWN]
    return {name: value for name, value in told if not any(word in name for word in _SECRET)}


def source_digest(package: Path) -> str:
    """Of all Python files of a package, so that an old copy on one node is noticed."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _least(*values: int) -> int:
    known = [value for value in values if value != UNLIMITED]
    return min(known) if known else UNLIMITED


def _cgroup_number(name: str, root: Path = _CGROUP) -> int:
    """The tightest of this process's control groups and those above; UNLIMITED where none says."""
    own = root
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = root / next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    found = UNLIMITED
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            break
        with suppress(OSError, ValueError):
            found = _least(found, int((group / name).read_text()))
    return found


def _file_system(path: Path) -> str:
    """Its kind, as `mount` says: the mount with the longest path above `path`."""
    found, longest = "", -1
    for one in psutil.disk_partitions(all=True):
        if path.is_relative_to(one.mountpoint) and len(one.mountpoint) > longest:
            found, longest = one.fstype, len(one.mountpoint)
    return found
