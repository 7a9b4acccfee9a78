"""Ray nodes of this machine, each with an address of its own, started as on a cluster: by scripts/ray_node.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[1]
_LIMIT_S = 300.0
_POLL_S = 0.1
_END_S = 60.0


def inherited(*prefixes: str) -> dict[str, str]:
    """The environment without variables that begin so."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


class RayNodes:
    """Nodes of simulated GPUs, the first of them the head of their cluster. Used by `with`."""

    def __init__(
        self,
        folder: Path,
        disk: Path,
        gpus: int,
        namespaces: Mapping[str, str] | None = None,
        inline_bytes: int = 1000,
    ) -> None:
        """folder: empty, for the token and the logs. disk: a short path, for what the nodes have of their own.

        namespaces: by address the file of the network namespace that a node is in, if it is not this process's.
        inline_bytes: larger results are stored on the nodes where they are made, as those of large models are.
        """
        self.folder = folder
        self.disk = disk
        self._gpus = gpus
        self._inline_bytes = inline_bytes
        self._namespaces = namespaces or {}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""  # of the head, as RAY_ADDRESS
        self.token = folder / "token"
        self.token.write_text("5" * 64)
        self.token.chmod(0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The head last: the other nodes would wait for it."""
        for address in reversed(list(self._nodes)):
            node = self._nodes[address]
            tree = _tree(node)
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(_END_S)
            _kill(tree)
            node.wait()

    def environment(self) -> dict[str, str]:
        """Of a node, and of a command on one."""
        return inherited("RAY_", "MEGARL_") | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_AUTH_MODE": "token",
            "MEGARL_GPUS_PER_NODE": str(self._gpus),
            "MEGARL_RAY_DIR": str(self.disk),
            "MEGARL_OBJECT_STORE_BYTES": str(2**27),
            "RAY_max_direct_call_object_size": str(self._inline_bytes),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, head: str, *others: str) -> None:
        """Start nodes of these addresses, and wait until all have joined."""
        self.start_head(head)
        for address in others:
            self.join(address)
        self.wait_for(1 + len(others))

    def start_head(self, address: str) -> None:
        file = self.folder / "address"
        self._start(address, "head", str(file), {})
        self._wait(file.exists)
        self.address = file.read_text().strip()

    def join(self, address: str, **environment: str) -> None:
        self._start(address, "worker", self.address, environment)

    def wait_for(self, count: int) -> None:
        """Wait until so many nodes are started, as Ray says when the head knows them."""
        self._wait(lambda: self._num_started() == count)

    def kill(self, address: str) -> None:
        """All processes of a node, as where its power fails; the raylet goes first, and so reports no other's end.

        Its folder goes too, also that of a node that has ended by itself.
        """
        node = self._nodes.pop(address)
        tree = _tree(node)
        tree.sort(key=lambda process: process.name() != "raylet")
        _kill(tree)
        node.wait()
        for file in self.disk.glob("megarl-*/address"):
            if file.read_text().strip() == address:
                shutil.rmtree(file.parent)

    def address_of(self, process: psutil.Process) -> str:
        """Of the node that a process is on. Raises ValueError where it is on none."""
        above = {parent.pid for parent in process.parents()}
        for address, node in self._nodes.items():
            if node.pid in above:
                return address
        raise ValueError(f"process {process.pid} is on no node")

    def has_ended(self, address: str) -> bool:
        """Whether a node has ended by itself."""
        return self._nodes[address].poll() is not None

    @property
    def addresses(self) -> list[str]:
        """Of the nodes that were not killed."""
        return [*self._nodes]

    def kill_agent(self, address: str) -> None:
        """One of the agents of its raylet, which ends with it."""
        tree = _tree(self._nodes[address])
        _kill([process for process in tree if "RuntimeEnvAgent" in process.name()])

    def is_running(self, address: str) -> bool:
        tree = _tree(self._nodes[address])
        return "raylet" in [process.name() for process in tree]

    def log(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("*.log"))

    def _start(self, address: str, role: str, meets: str, environment: dict[str, str]) -> None:
        own = {"MEGARL_NODE_ADDRESS": address, "SLURMD_NODENAME": f"{address}.slurm"}
        variables = self.environment() | own | environment
        command = ["bash", str(ROOT / "scripts/ray_node.sh"), role, meets]
        if namespace := self._namespaces.get(address):
            command = ["nsenter", f"--net={namespace}", *command]
        with (self.folder / f"{address}.log").open("ab") as log:
            self._nodes[address] = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=log, stderr=log
            )

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not holds():
            assert all(node.poll() is None for node in self._nodes.values()), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(_POLL_S)

    def _num_started(self) -> int:
        logs = self.disk.glob("megarl-*/start.log")
        return sum("Ray runtime started." in log.read_text() for log in logs)


def _tree(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if node.poll() is not None:
        return []
    process = psutil.Process(node.pid)
    return [process, *process.children(recursive=True)]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
