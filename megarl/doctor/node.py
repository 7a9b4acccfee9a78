"""Gathers all facts of the node that this process is on."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.doctor import gpus, machine, network, packages
from megarl.doctor.facts import NodeFacts, Port

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Wanted:
    """The folders and ports that a node checks: folders that a run writes or reads, ports that must be free.

    shared_name: a file in the first of the written folders, which all nodes must see; "" for a single node.
    """

    written: Sequence[tuple[str, str]] = ()  # path, purpose
    read: Sequence[tuple[str, str]] = ()
    ports: Sequence[int] = ()
    ray_port: int | None = None  # the port of a Ray that is started by hand; None where a cluster is running
    shared_name: str = ""


class Node:
    """The process that examines its node; in a cluster Ray starts one on each node."""

    def clock(self) -> float:
        """Seconds since the epoch by this node's clock."""
        return time.time()

    def look(self, address: str, wanted: Wanted) -> NodeFacts:
        """Gather the facts; takes some ten seconds where there are GPUs, mostly for imports."""
        found = gpus.gpu_facts()
        addresses = [gpu.pci for gpu in found.gpus]
        shm_total, shm_free = machine.disk_bytes(machine.SHM)
        names = [wanted.shared_name] + [""] * len(wanted.written)
        written = [
            machine.folder(Path(path), purpose, is_written=True, shared_name=name)
            for (path, purpose), name in zip(wanted.written, names, strict=False)
        ]
        read = [machine.folder(Path(path), purpose, is_written=False) for path, purpose in wanted.read]
        return NodeFacts(
            host=socket.gethostname(),
            address=address,
            kernel=platform.release(),
            python=platform.python_version(),
            num_cores=len(os.sched_getaffinity(0)),
            host_bytes=machine.host_bytes(),
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            limits=machine.limits(),
            nvidia_smi=found.error,
            driver=found.driver,
            driver_cuda=found.driver_cuda,
            gpus=found.gpus,
            topology=found.topology,
            has_peermem=found.has_peermem,
            has_open_driver=found.has_open_driver,
            nics=tuple(network.nics()),
            gpu_nics=network.gpu_nics(addresses),
            nic_faults=tuple(network.nic_faults(addresses, address)),
            torch=packages.torch_facts(),
            versions=packages.versions(),
            import_errors=packages.import_errors() if found.gpus else {},
            pins=packages.sglang_pins(),
            source=machine.source_digest(_PACKAGE),
            environment=machine.environment(os.environ.items()),
            folders=(*written, *read),
            ports=tuple(_ports(wanted)),
        )


def _ports(wanted: Wanted) -> list[Port]:
    found = [machine.port(number) for number in wanted.ports]
    if wanted.ray_port and wanted.ray_port not in wanted.ports:
        found.append(machine.port(wanted.ray_port, is_needed=False))
    return found
