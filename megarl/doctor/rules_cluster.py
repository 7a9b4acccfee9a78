"""Rules about several nodes, which should be alike, and about what a recipe needs of its nodes. Pure.

`megarl.preflight.checks_by_command` finds the recipe's own errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, Problems, Severity, gb, of_node

_SKEW_S = 5.0
_SMALL_SKEW_S = 0.5
_ABSENT = "nothing"

# 1: every process sees all GPUs and selects one by slot
_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_FP8_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
# of the memory in the hardware file: a node may have less, by its firmware
_HOST_SHARE = 0.9
_DEVICE_SHARE = 0.97


def cluster_findings(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The findings about nodes of one cluster; for a single node only those about its clock, Ray's GPUs and folders."""
    findings: list[Finding] = []
    for node in nodes:
        findings += of_node(node, _clock(node), _ray_gpus(node), _shared(node, nodes[0]))
    if len(nodes) > 1:
        findings += _differences(nodes)
        for node in nodes:
            findings += of_node(node, _no_fabric(node))
    return findings


def recipe_findings(
    recipe: Recipe, nodes: Sequence[NodeFacts], hardware: Hardware | None, checkpoint_bytes: int
) -> list[Finding]:
    """What nodes lack for a recipe. hardware: placement.hardware; checkpoint_bytes: of one checkpoint, 0 if unknown."""
    problems = [*_places(recipe, nodes), *_checkpoints(recipe, nodes, checkpoint_bytes)]
    findings = [Finding(*problem) for problem in problems]
    for node in nodes:
        findings += of_node(node, _card(node, hardware), _fp8(recipe, node))
    return findings


def _clock(node: NodeFacts) -> Problems:
    sure = abs(node.clock_offset_s) - node.clock_error_s
    if sure > _SMALL_SKEW_S:
        way = "ahead of" if node.clock_offset_s > 0 else "behind"
        problem = f"{abs(node.clock_offset_s):.1f} s {way} the first node's: logs and files cannot be put in order"
        severity = "error" if sure > _SKEW_S else "warning"
        yield severity, "clock", problem, "let chronyd or ntpd set it on every node"


def _ray_gpus(node: NodeFacts) -> Problems:
    if not node.gpus or node.ray_gpus is None:
        return
    if node.ray_gpus != len(node.gpus):
        yield (
            "error",
            "Ray",
            f"Ray counts {node.ray_gpus} GPUs, nvidia-smi lists {len(node.gpus)}",
            "restart Ray there with --num-gpus, or mend the GPUs",
        )
    if node.environment.get(_ALL_GPUS) != "1":
        yield (
            "error",
            _ALL_GPUS,
            "it is not 1 in Ray's environment: Ray hides all GPUs but one from each process",
            "export it before Ray is started there, or start Ray by scripts/ray_node.sh",
        )


def _shared(node: NodeFacts, first: NodeFacts) -> Problems:
    of_first = {folder.path for folder in first.folders if folder.exists}
    for folder in node.folders:
        where = f"{folder.path} ({folder.purpose})"
        if folder.is_shared is False:
            yield (
                "error",
                where,
                "a file of the first node is not seen there",
                "name a folder on a disk that all nodes share",
            )
        if not folder.exists and folder.path in of_first and folder.is_shared is None:
            yield (
                "error",
                where,
                "it is on the first node, and not there",
                "put it on a disk that all share, or copy it",
            )


def _no_fabric(node: NodeFacts) -> Problems:
    if node.gpus and not any(nic.is_up for nic in node.nics):
        yield (
            "warning",
            "network",
            "no RDMA card is up: between nodes NCCL uses TCP sockets",
            "look at ibstat, or book nodes with cards",
        )


def _differences(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """What should be the same on all nodes: versions, the kind of GPUs, exported variables."""

    def unequal(
        severity: Severity, where: str, hint: str, value: Callable[[NodeFacts], str]
    ) -> Iterator[Finding]:
        """A finding for each value but the most common one; in a tie the first node's counts as the most common."""
        values = {node.address: value(node) for node in nodes}
        (usual, count), *others = Counter(values.values()).most_common()
        for other, _ in others:
            who = tuple(address for address, node_value in values.items() if node_value == other)
            problem = f"{other}, where {count} node{'s have' if count > 1 else ' has'} {usual}"
            yield Finding(severity, where, problem, hint, who)

    def gpus(node: NodeFacts) -> str:
        names = sorted({gpu.name for gpu in node.gpus})
        if names:
            return f"{len(node.gpus)} x {' and '.join(names)}"
        return _ABSENT

    install = "install the same environment on all nodes"
    for name in sorted({name for node in nodes for name in node.versions}):
        yield from unequal(
            "error", name, install, lambda node, name=name: node.versions.get(name, _ABSENT)
        )
    yield from unequal("error", "Python", install, lambda node: node.python)
    yield from unequal("error", "NCCL", install, lambda node: node.torch.nccl or _ABSENT)
    yield from unequal(
        "error", "megarl", "copy one commit to all nodes", lambda node: f"source {node.source}"
    )
    yield from unequal(
        "warning", "driver", "install the same one", lambda node: node.driver or _ABSENT
    )
    yield from unequal(
        "warning", "GPUs", "book nodes of one kind: a run wants as many GPUs of each", gpus
    )
    hint = "export the same on every node before Ray is started there (scripts/launch_env.sh)"
    for name in sorted({name for node in nodes for name in node.environment}):
        yield from unequal(
            "warning", name, hint, lambda node, name=name: node.environment.get(name, _ABSENT)
        )


def _places(recipe: Recipe, nodes: Sequence[NodeFacts]) -> Problems:
    """Too few nodes with the recipe's number of GPUs."""
    placement = recipe.placement
    here = len(nodes[0].gpus)
    if placement.network == "loopback":
        if 0 < here < placement.gpus:
            yield (
                "error",
                "placement.gpus",
                f"{placement.gpus} GPUs, and this machine has {here}",
                "set it to those there are, or placement.network to nodes",
            )
        return
    each = placement.gpus_per_node
    num_nodes = -(-recipe.first_gpus // each)
    fit = [node for node in nodes if node.ray_gpus == each]
    if nodes[0].ray_gpus is None:
        return
    if len(fit) < num_nodes:
        yield (
            "error",
            "placement.gpus",
            f"{recipe.first_gpus} GPUs are {num_nodes} nodes of {each}, Ray has {len(fit)} with as many GPUs",
            "start Ray on more nodes, or correct placement.gpus_per_node",
        )
    elif len(fit) < num_nodes + placement.spare_nodes:
        yield (
            "error",
            "placement.spare_nodes",
            f"{num_nodes} nodes of {each} GPUs and {placement.spare_nodes} spare, Ray has {len(fit)} with as many GPUs",
            "start Ray on more nodes, or lower it",
        )


def _checkpoints(recipe: Recipe, nodes: Sequence[NodeFacts], checkpoint_bytes: int) -> Problems:
    """A disk of run.dir that has no space for all kept checkpoints and the one that is being written."""
    if not recipe.checkpoint.every or not checkpoint_bytes:
        return
    folder = next((folder for folder in nodes[0].folders if folder.purpose == "run.dir"), None)
    needed = (recipe.checkpoint.keep + 1) * checkpoint_bytes
    if folder and folder.total_bytes and folder.free_bytes < needed:
        kept = f"{recipe.checkpoint.keep} checkpoints and one being written"
        yield (
            "error",
            f"{folder.path} (run.dir)",
            f"{gb(folder.free_bytes)} free; {kept} take {gb(needed)}",
            "make room, lower checkpoint.keep, or name a folder on another disk",
        )


def _card(node: NodeFacts, hardware: Hardware | None) -> Problems:
    if hardware is None or not node.gpus:
        return
    name = node.gpus[0].name
    memory = min((gpu.memory_bytes or 0) for gpu in node.gpus)
    if not hardware.is_card(name):
        yield (
            "warning",
            "placement.hardware",
            f"{hardware.name}, and the GPUs are {name}: a plan of this recipe is another card's",
            "name the file of this card, or write one with megarl doctor --measure",
        )
    elif memory and memory < _DEVICE_SHARE * hardware.memory_bytes:
        yield (
            "warning",
            "placement.hardware",
            f"it plans with {gb(hardware.memory_bytes)} of a GPU, and one has {gb(memory)}",
            "correct memory_bytes in the file",
        )
    if node.host_bytes < _HOST_SHARE * hardware.host_bytes:
        yield (
            "warning",
            "placement.hardware",
            f"it plans with {gb(hardware.host_bytes)} of host memory, and the node has {gb(node.host_bytes)}",
            "correct host_bytes in the file",
        )


def _fp8(recipe: Recipe, node: NodeFacts) -> Problems:
    for gpu in node.gpus if recipe.rollout.engine.weights == "fp8" else ():
        major, _, minor = gpu.compute_capability.partition(".")
        if major.isdigit() and minor.isdigit() and (int(major), int(minor)) < _FP8_CAPABILITY:
            yield (
                "error",
                "rollout.engine.weights",
                f"GPU {gpu.index} ({gpu.name}) has no float8 (compute capability {gpu.compute_capability})",
                "set it to plain, or book newer GPUs",
            )
