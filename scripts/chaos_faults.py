"""The faults of chaos.py: what is done, to whom, and what a run leaves behind that was hit."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import psutil

# of each kind of fault the roles that it can hit
PROCESSES = ("engine", "scheduler", "rank", "critic", "reward model", "keeper")
WORKERS = ("reward worker", "tool worker")
RAY = ("Ray worker", "raylet")
NODES = ("second raylet", "second node")
KINDS: Mapping[str, tuple[str, ...]] = {
    "kill": (*PROCESSES, *WORKERS, *RAY, *NODES),
    "stop": (*PROCESSES, *WORKERS, "Ray worker", "second raylet"),
    "raise": ("rank", "critic", "reward model"),
    "sockets": (*PROCESSES, *WORKERS, "Ray worker"),
    "memory": (*PROCESSES, *WORKERS),
    "full": ("disk",),
    "slow": ("disk",),
    "network": ("second node",),
    "short network": ("second node",),
}
MARKER = "MEGARL_CHAOS"  # in the environment of all processes of a run
DISK_S = 8.0  # for which a disk is full, or does not answer
_PIDFD_GETFD = 438
_LEFT_S = 20.0  # within which processes and files of a run that has ended are gone


@dataclass(frozen=True)
class Fault:
    """What is done to a process of a role, `share` of the phase's usual seconds after the phase has begun."""

    kind: str
    role: str
    phase: str
    share: float

    def __str__(self) -> str:
        return f"{self.kind} {self.role} in {self.phase}"


class Victims:
    """The processes of a run by their roles, as its driver tells them in a file."""

    def __init__(self, state: Path, pid: int) -> None:
        """pid: of the command."""
        self._pids: Mapping[str, int] = json.loads(state.read_text())["pids"]
        self._pid = pid

    def of(self, role: str) -> list[int]:
        """Those that are alive, in order."""
        engines = self._named("engine")
        by_role: dict[str, Callable[[], list[int]]] = {
            "engine": lambda: engines,
            "scheduler": lambda: _below(engines, "forkserver"),
            "rank": lambda: self._named("training rank"),
            "critic": lambda: self._named("critic rank"),
            "reward model": lambda: self._named("reward model rank"),
            "keeper": lambda: self._named("keeper"),
            "reward worker": lambda: _below(engines, "reward_workers"),
            "tool worker": lambda: _below(engines, "environment"),
            "Ray worker": self._others_of_ray,
            "raylet": self._raylets,
        }
        return [pid for pid in sorted(by_role[role]()) if psutil.pid_exists(pid)]

    def _named(self, beginning: str) -> list[int]:
        return [pid for name, pid in self._pids.items() if name.startswith(beginning)]

    def name(self, role: str) -> str:
        """A worker with the role."""
        beginning = {"rank": "training rank", "critic": "critic rank"}.get(role, role)
        return next((name for name in self._pids if name.startswith(beginning)), "")

    def _raylets(self) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._pid).children(recursive=True)
            return [process.pid for process in tree if process.name() == "raylet"]
        return []

    def _others_of_ray(self) -> list[int]:
        """Processes that Ray holds ready, in none of which a part of the run is."""
        return [
            child.pid
            for raylet in self._raylets()
            for child in psutil.Process(raylet).children()
            if child.pid not in self._pids.values()
        ]


def _below(pids: Sequence[int], word: str) -> list[int]:
    """The children of those children of the processes whose command line has the word."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children():
                if word in " ".join(child.cmdline()):
                    found += [process.pid for process in child.children()]
    return found


def hit(kind: str, pid: int) -> None:
    """Do to a process what a fault does. Raises psutil.NoSuchProcess or ProcessLookupError where it has ended."""
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif kind == "sockets":
        _shut_sockets(pid)
    elif kind == "memory":
        # every larger allocation fails from now on
        used = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    else:
        raise ValueError(kind)


def _shut_sockets(pid: int) -> None:
    """Shut the TCP connections of another process down, as a network that fails does."""
    libc = ctypes.CDLL(None, use_errno=True)
    connections = psutil.Process(pid).net_connections("tcp")
    process = os.pidfd_open(pid)
    for connection in connections:
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        copy = libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
        if copy >= 0:
            with socket.socket(fileno=copy) as shared, suppress(OSError):
                shared.shutdown(socket.SHUT_RDWR)
    os.close(process)


class Disk:
    """A disk of its own for a run, which can be full or stop to answer; needs root, and a loop device."""

    _SCRIPT = 'mkfs.ext4 -q -F "$1" && mount -o loop "$1" "$2" && echo mounted && exec cat'

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """folder: for the disk's image and the place where it is mounted, which no other process sees."""
        image = folder / "disk.img"
        self._at = folder / "disk"
        self._at.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(num_bytes)
        command = ["unshare", "--mount", "sh", "-c", self._SCRIPT, "sh", str(image), str(self._at)]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout
        if self._holder.stdout.readline() != "mounted\n":
            raise RuntimeError("a disk of its own needs root and a free loop device")
        # by which every process reaches it
        self.path = Path(f"/proc/{self._holder.pid}/root{self._at}")

    def close(self) -> None:
        self._holder.communicate()

    @contextmanager
    def broken(self, kind: str) -> Iterator[None]:
        """kind: full; slow: it answers nothing, and whoever asks it cannot even be killed."""
        if kind == "full":
            filler = self.path / "filler"
            with filler.open("wb", buffering=0) as file:
                self._take_all(file)
            try:
                yield
            finally:
                filler.unlink()
            return
        self._freeze("-f")
        try:
            yield
        finally:
            self._freeze("-u")

    def _take_all(self, file: FileIO) -> None:
        """At once, before the phase is over: most without writing it."""
        disk = os.statvfs(self.path)
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, disk.f_bfree * disk.f_frsize)
        file.seek(0, os.SEEK_END)
        with suppress(OSError):
            while file.write(bytes(2**16)):
                pass

    def _freeze(self, option: str) -> None:
        enter = ["nsenter", f"--target={self._holder.pid}", "--mount"]
        subprocess.run([*enter, "fsfreeze", option, str(self._at)], check=True)


class Leftovers:
    """Processes and files that a run has left, though it has ended."""

    def __init__(
        self, marker: str, is_on_node: Callable[[psutil.Process], bool] = lambda _: False
    ) -> None:
        """marker: the value of MARKER in the run's processes. is_on_node: whether a node has a process for it."""
        self._marker = marker
        self._is_on_node = is_on_node
        self._before = _shared_memory()

    def found(self) -> list[str]:
        """What stays: processes, and files in shared places that no living process of another run uses."""
        deadline = time.monotonic() + _LEFT_S
        while True:
            files = self._session_folders() | (_shared_memory() - self._before)
            left = [*self._processes(), *map(_with_content, _unused(files))]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def _processes(self) -> list[str]:
        left = []
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if self._is_ours(process) and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"process {process.pid} {' '.join(process.info['cmdline'])[:80]}")
        return left

    def _session_folders(self) -> set[str]:
        """Of the run's own sessions: others of this machine leave theirs for their next start to remove."""
        with suppress(FileNotFoundError):
            return {*(Path(self._marker) / "sessions").read_text().splitlines()}
        return set()

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.environ().get(MARKER) == self._marker or self._is_on_node(process)


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


def _with_content(path: str) -> str:
    """The path, with the first files in it if it is a folder: they tell who has written there."""
    files = [str(file.relative_to(path)) for file in Path(path).rglob("*") if not file.is_dir()]
    return f"{path} ({', '.join(sorted(files)[:5])})" if files else path


def _unused(paths: set[str]) -> list[str]:
    """Those that still exist and no process has open, or has as the folder of its temporary files."""
    if not paths:
        return []
    used = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            used.add(process.environ().get("TMPDIR", ""))
            used.add(process.environ().get("RAY_TMPDIR", ""))
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            used |= {path for path in paths if path in maps}
            used |= {str(opened.resolve()) for opened in Path(f"/proc/{process.pid}/fd").iterdir()}
    is_used = [any(name == path or name.startswith(f"{path}/") for name in used) for path in paths]
    return sorted(
        path for path, use in zip(paths, is_used, strict=True) if not use and os.path.exists(path)
    )


def drawn(seed: int, run: str, index: int, roles: Sequence[str], phases: Sequence[str]) -> Fault:
    """The fault of this number. roles, phases: of the run, which starts less often than it does anything else."""
    rng = random.Random(f"{seed} {run} {index}")
    kind, role = rng.choice(
        [(kind, role) for kind, of_kind in KINDS.items() for role in of_kind if role in roles]
    )
    weights = [1 if phase == "start" else 4 for phase in phases]
    (phase,) = rng.choices(phases, weights)
    return Fault(kind, role, phase, rng.random())
