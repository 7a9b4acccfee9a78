"""Rules about differences between nodes: versions, clocks, environments, disks that are not shared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, Severity, on_node

_SKEW_S, _SMALL_SKEW_S = 5.0, 0.5
_ABSENT = "nothing"
_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # 1: every process sees all GPUs and selects one by slot


def cluster_findings(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The findings of these rules; for a single node only those about its clock, Ray's GPUs and its folders."""
    each = chain.from_iterable(chain(_clock(node), _ray_gpus(node), _shared(node, nodes[0])) for node in nodes)
    if len(nodes) < 2:
        return [*each]
    return [*each, *_versions(nodes), *_kinds(nodes), *_environments(nodes), *_no_fabric(nodes)]


def _clock(node: NodeFacts) -> Iterator[Finding]:
    sure = abs(node.clock_offset_s) - node.clock_error_s
    if sure <= _SMALL_SKEW_S:
        return
    severity: Severity = "fault" if sure > _SKEW_S else "warning"
    way = "ahead of" if node.clock_offset_s > 0 else "behind"
    problem = f"{abs(node.clock_offset_s):.1f} s {way} the first node's: logs and files cannot be put in order"
    yield on_node(node, severity, "clock", problem, "let chronyd or ntpd set it on every node")


def _ray_gpus(node: NodeFacts) -> Iterator[Finding]:
    if node.has_gpus and node.ray_gpus is not None and node.ray_gpus != len(node.gpus):
        problem = f"Ray counts {node.ray_gpus} GPUs, nvidia-smi lists {len(node.gpus)}"
        mend = "restart Ray there with --num-gpus, or mend the GPUs"
        yield on_node(node, "fault", "Ray", problem, mend)
    if node.has_gpus and node.ray_gpus is not None and node.environment.get(_ALL_GPUS) != "1":
        problem = "it is not 1 in Ray's environment: Ray hides all GPUs but one from each process"
        mend = "export it before Ray is started there, or start Ray by scripts/ray_node.sh"
        yield on_node(node, "fault", _ALL_GPUS, problem, mend)


def _shared(node: NodeFacts, first: NodeFacts) -> Iterator[Finding]:
    for folder in node.folders:
        where = f"{folder.path} ({folder.purpose})"
        if folder.is_shared is False:
            problem, mend = "a file of the first node is not seen there", "name a folder on a disk that all nodes share"
            yield on_node(node, "fault", where, problem, mend)
        of_first = {other.path for other in first.folders if other.exists}
        if not folder.exists and folder.path in of_first and folder.is_shared is None:
            problem, mend = "it is on the first node, and not there", "put it on a disk that all share, or copy it"
            yield on_node(node, "fault", where, problem, mend)


def _versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    install = "install the same environment on all nodes"
    for name in sorted({name for node in nodes for name in node.versions}):
        yield from _unequal(nodes, name, lambda node, name=name: node.versions.get(name, _ABSENT), "fault", install)
    yield from _unequal(nodes, "Python", lambda node: node.python, "fault", install)
    yield from _unequal(nodes, "NCCL", lambda node: node.torch.nccl or _ABSENT, "fault", install)
    yield from _unequal(nodes, "megarl", lambda node: f"source {node.source}", "fault", "copy one commit to all nodes")
    yield from _unequal(nodes, "driver", lambda node: node.driver or _ABSENT, "warning", "install the same one")


def _kinds(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    def gpus(node: NodeFacts) -> str:
        names = sorted({gpu.name for gpu in node.gpus})
        return f"{len(node.gpus)} x {' and '.join(names)}" if names else _ABSENT

    yield from _unequal(nodes, "GPUs", gpus, "warning", "book nodes of one kind: a run wants as many GPUs of each")


def _environments(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Variables that differ between nodes, because they are exported on some nodes only."""
    mend = "export the same on every node before Ray is started there (scripts/launch_env.sh)"
    for name in sorted({name for node in nodes for name in node.environment}):
        yield from _unequal(nodes, name, lambda node, name=name: node.environment.get(name, _ABSENT), "warning", mend)


def _no_fabric(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        if node.has_gpus and not any(nic.is_up for nic in node.nics):
            problem = "no RDMA card is up: between nodes NCCL uses TCP sockets"
            yield on_node(node, "warning", "network", problem, "look at ibstat, or book nodes with cards")


def _unequal(
    nodes: Sequence[NodeFacts], where: str, value: Callable[[NodeFacts], str], severity: Severity, mend: str
) -> Iterator[Finding]:
    """A finding for each value other than the most common one; in a tie the first node's counts as the most common."""
    values: Mapping[str, str] = {node.address: value(node) for node in nodes}
    (usual, count), *others = Counter(values.values()).most_common()
    for other, _ in others:
        who = tuple(address for address, found in values.items() if found == other)
        problem = f"{other}, where {count} node{'s have' if count > 1 else ' has'} {usual}"
        yield Finding(severity, where, problem, mend, who)
