"""Gathers the facts of this machine, or of all nodes of the Ray cluster that RAY_ADDRESS names."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.device import LOOPBACK
from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, of_faults
from megarl.doctor.node import Node, Wanted
from megarl.types import UserFault

_NODE = "megarl.doctor.node:Node"
_START_S = 120.0  # of a process: imports from a cold shared disk
_LOOK_S = 900.0
_CLOCK_TRIES = 5


@dataclass(frozen=True)
class Survey:
    """nodes: the facts of nodes that answered, this machine's first; findings: why other nodes did not."""

    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...] = ()


def survey_here(wanted: Wanted) -> Survey:
    """The facts of this machine, without Ray."""
    return Survey((Node().look(LOOPBACK, wanted),))


def survey_cluster(wanted: Wanted, say: Callable[[str], None]) -> Survey:
    """The facts of every node; where the cluster cannot be joined, those of this machine and the reason."""
    from megarl.cluster.actor import RayNode, answers, ray_nodes
    from megarl.cluster.session import Cluster

    def ask(nodes: Sequence[RayNode], timeout_s: float, method: str, *args: Any) -> Mapping[str, Any]:
        return answers({node.worker.call(method, *args): node.address for node in nodes}, timeout_s)

    try:
        with Cluster(0, node_gpus=1, say=say) as cluster:
            nodes = sorted(ray_nodes(cluster.host), key=lambda node: node.address != cluster.host)
            started = answers({node.worker.start(_NODE): node.address for node in nodes}, _START_S)
            up = [node for node in nodes if not isinstance(started[node.address], Exception)]
            offsets = {node.address: _offset(lambda node=node: ask([node], _START_S, "clock")) for node in up}
            with _probe(wanted) as shared_name:
                own = replace(wanted, shared_name=shared_name)
                calls = {node.worker.call("look", node.address, own): node.address for node in up}
                seen = answers(calls, _LOOK_S)
    except UserFault as fault:
        return replace(survey_here(wanted), findings=tuple(of_faults([fault])))
    failed = {**started, **seen}
    findings = tuple(_silent(address, why) for address, why in failed.items() if isinstance(why, Exception))
    found = [node for node in up if isinstance(seen[node.address], NodeFacts)]
    return Survey(tuple(_complete(seen[node.address], node.gpus, offsets[node.address]) for node in found), findings)


def clock_offset(asked_s: float, remote_s: float, answered_s: float) -> tuple[float, float]:
    """(remote clock minus ours, uncertainty: half of the round trip), by Cristian's algorithm."""
    return remote_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2


def _offset(ask: Callable[[], Mapping[str, Any]]) -> tuple[float, float]:
    """The most certain of several offsets; (0, a large uncertainty) where the node does not answer."""
    found = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        (remote,) = ask().values()
        if isinstance(remote, float):
            found.append(clock_offset(asked, remote, time.time()))
    return min(found, key=lambda offset: offset[1], default=(0.0, _START_S))


@contextmanager
def _probe(wanted: Wanted) -> Iterator[str]:
    """Write a file in the first written folder, or in its nearest existing parent; yields its name.

    "" where there is no such folder, or nothing can be written, which is a finding about the folder.
    """
    with ExitStack() as stack:
        name = ""
        for path in [Path(path).absolute() for path, _ in wanted.written[:1]]:
            existing = next(folder for folder in (path, *path.parents) if folder.exists())
            with suppress(OSError):
                name = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".megarl-doctor-", dir=existing)).name
        yield Path(name).name


def _complete(facts: NodeFacts, gpus: int, offset: tuple[float, float]) -> NodeFacts:
    return replace(facts, ray_gpus=gpus, clock_offset_s=offset[0], clock_error_s=offset[1])


def _silent(address: str, why: Exception) -> Finding:
    """The finding about a node on which no process could be started, or did not finish."""
    if isinstance(why, UserFault):
        return Finding("fault", why.where, why.problem, why.mend, (address,))
    cause = (str(why).strip().splitlines() or [type(why).__name__])[-1]
    mend = "look at the node and at Ray's logs there, or start Ray without it"
    return Finding("fault", "Ray", f"no answer from a process there ({cause})", mend, (address,))
