"""Gathers the facts of this machine, or of all nodes of the Ray cluster that RAY_ADDRESS names."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import megarl
from megarl.device import LOOPBACK
from megarl.doctor import machine, nvidia, packages
from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, of_faults
from megarl.types import UserFault

_NODE = "megarl.doctor.survey:Node"
_START_S = 120.0  # of a process: imports from a cold shared disk
_LOOK_S = 900.0
_CLOCK_TRIES = 5


@dataclass(frozen=True)
class Wanted:
    """The folders and ports that each node checks. written: folders that a run writes, run.dir first; read: or reads.

    ports: whether a run needs the port to be free; the others are only for a Ray that is started by hand. shared_name:
    a file in the first of the written folders, which all nodes must see; "" for a single node.
    """

    written: Sequence[tuple[str, str]]  # path, purpose
    read: Sequence[tuple[str, str]]
    ports: Mapping[int, bool]
    shared_name: str = ""


class Node:
    """The process that examines its node; in a cluster Ray starts one on each node."""

    def clock(self) -> float:
        """Seconds since the epoch by this node's clock."""
        return time.time()

    def look(self, address: str, wanted: Wanted) -> NodeFacts:
        """Gather the facts; takes some ten seconds where there are GPUs, mostly for imports."""
        found = nvidia.gpu_facts()
        gpu_nics, nic_faults = machine.gpu_nics([gpu.pci for gpu in found.gpus], address)
        shm_total, shm_free = machine.disk_bytes(Path("/dev/shm"))
        folders = []
        for path, purpose in wanted.written:
            name = "" if folders else wanted.shared_name
            folders.append(machine.folder(Path(path), purpose, is_written=True, shared_name=name))
        folders += [machine.folder(Path(path), purpose, is_written=False) for path, purpose in wanted.read]
        return NodeFacts(
            **vars(found),
            host=socket.gethostname(),
            address=address,
            kernel=platform.release(),
            python=platform.python_version(),
            num_cores=len(os.sched_getaffinity(0)),
            host_bytes=machine.host_bytes(),
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            limits=machine.limits(),
            nics=tuple(machine.nics()),
            gpu_nics=gpu_nics,
            nic_faults=nic_faults,
            torch=packages.torch_facts(),
            versions=packages.versions(),
            import_errors=packages.import_errors() if found.gpus else {},
            pins=packages.sglang_pins(),
            source=machine.source_digest(Path(megarl.__file__).parent),
            environment=machine.environment(os.environ.items()),
            folders=tuple(folders),
            ports=tuple(machine.port(number, is_needed=needed) for number, needed in wanted.ports.items()),
        )


def survey_here(wanted: Wanted) -> list[NodeFacts]:
    """The facts of this machine, without Ray."""
    return [Node().look(LOOPBACK, wanted)]


def survey_cluster(wanted: Wanted, say: Callable[[str], None]) -> tuple[list[NodeFacts], list[Finding]]:
    """(facts of the nodes that answered, this machine's first; findings: why other nodes did not).

    Where the cluster cannot be joined, the facts of this machine and the reason.
    """
    from megarl.cluster.actor import answers, ray_nodes
    from megarl.cluster.session import Cluster

    try:
        with Cluster(0, node_gpus=1, say=say) as cluster:
            nodes = sorted(ray_nodes(cluster.host), key=lambda node: node.address != cluster.host)
            started = answers({node.worker.start(_NODE): node.address for node in nodes}, _START_S)
            up = [node for node in nodes if not isinstance(started[node.address], Exception)]
            offsets = {
                node.address: _offset(lambda node=node: answers({node.worker.call("clock"): ""}, _START_S)[""])
                for node in up
            }
            with _probe(wanted) as shared_name:
                own = replace(wanted, shared_name=shared_name)
                calls = {node.worker.call("look", node.address, own): node.address for node in up}
                seen = answers(calls, _LOOK_S)
    except UserFault as fault:
        return survey_here(wanted), of_faults([fault])
    failed = {**started, **seen}
    findings = [_silent(address, why) for address, why in failed.items() if isinstance(why, Exception)]
    found = []
    for node in up:
        offset_s, error_s = offsets[node.address]
        if isinstance(facts := seen[node.address], NodeFacts):
            found.append(replace(facts, ray_gpus=node.gpus, clock_offset_s=offset_s, clock_error_s=error_s))
    return found, findings


def _offset(remote_clock: Callable[[], object]) -> tuple[float, float]:
    """(remote clock minus ours, uncertainty: half of the round trip), by Cristian's algorithm.

    The most certain of several; (0, a large uncertainty) where the node does not answer.
    """
    found = []
    for _ in range(_CLOCK_TRIES):
        asked_s = time.time()
        remote_s, answered_s = remote_clock(), time.time()
        if isinstance(remote_s, float):
            found.append((remote_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2))
    return min(found, key=lambda offset: offset[1], default=(0.0, _START_S))


@contextmanager
def _probe(wanted: Wanted) -> Iterator[str]:
    """Write a file in the first written folder, or in its nearest existing parent; yields its name.

    "" where nothing can be written, which is a finding about the folder.
    """
    path, name = Path(wanted.written[0][0]).absolute(), ""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    with ExitStack() as stack:
        with suppress(OSError):
            name = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".megarl-doctor-", dir=existing)).name
        yield Path(name).name


def _silent(address: str, why: Exception) -> Finding:
    """The finding about a node on which no process could be started, or did not finish."""
    if isinstance(why, UserFault):
        return Finding("fault", why.where, why.problem, why.mend, (address,))
    cause = (str(why).strip().splitlines() or [type(why).__name__])[-1]
    mend = "look at the node and at Ray's logs there, or start Ray without it"
    return Finding("fault", "Ray", f"no answer from a process there ({cause})", mend, (address,))
