"""Rules about what a recipe needs of the nodes. Pure; `megarl.preflight.check` finds the recipe's own faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding, on_node
from megarl.doctor.rules_node import gb

_FP8_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
_HOST_SHARE, _DEVICE_SHARE = 0.9, 0.97  # of the memory in the hardware file: a node may have less, by its firmware


def recipe_findings(
    recipe: Recipe, nodes: Sequence[NodeFacts], hardware: Hardware | None, checkpoint_bytes: int
) -> list[Finding]:
    """The findings of these rules. hardware: placement.hardware; checkpoint_bytes: of one checkpoint, 0 if unknown."""
    found = [*_places(recipe, nodes), *_checkpoints(recipe, nodes, checkpoint_bytes)]
    each = (chain(_card(node, hardware), _fp8(recipe, node)) for node in nodes)
    return found + [*chain.from_iterable(each)]


def _places(recipe: Recipe, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Too few nodes with the recipe's number of GPUs."""
    placement = recipe.placement
    if placement.network == "loopback":
        here = len(nodes[0].gpus)
        if here and here < placement.gpus:
            problem = f"{placement.gpus} GPUs, and this machine has {here}"
            mend = "set it to those there are, or placement.network to nodes"
            yield Finding("fault", "placement.gpus", problem, mend)
        return
    wanted, each = -(-placement.gpus // placement.gpus_per_node), placement.gpus_per_node
    fit = [node for node in nodes if node.ray_gpus == each]
    if nodes[0].ray_gpus is not None and len(fit) < wanted:
        problem = f"{placement.gpus} GPUs are {wanted} nodes of {each}, Ray has {len(fit)} with as many GPUs"
        yield Finding("fault", "placement.gpus", problem, "start Ray on more nodes, or correct placement.gpus_per_node")


def _checkpoints(recipe: Recipe, nodes: Sequence[NodeFacts], checkpoint_bytes: int) -> Iterator[Finding]:
    """A disk of run.dir that has no space for all kept checkpoints and the one that is being written."""
    if not recipe.checkpoint.every or not checkpoint_bytes:
        return
    folder = next((folder for folder in nodes[0].folders if folder.purpose == "run.dir"), None)
    needed = (recipe.checkpoint.keep + 1) * checkpoint_bytes
    if folder and folder.total_bytes and folder.free_bytes < needed:
        kept = f"{recipe.checkpoint.keep} checkpoints and one being written"
        problem = f"{gb(folder.free_bytes)} free; {kept} take {gb(needed)}"
        mend = "make room, lower checkpoint.keep, or name a folder on another disk"
        yield Finding("fault", f"{folder.path} (run.dir)", problem, mend)


def _card(node: NodeFacts, hardware: Hardware | None) -> Iterator[Finding]:
    if hardware is None or not node.has_gpus:
        return
    name, memory = node.gpus[0].name, min((gpu.memory_bytes or 0) for gpu in node.gpus)
    if not hardware.is_card(name):
        problem = f"{hardware.name}, and the GPUs are {name}: a plan of this recipe is another card's"
        mend = "name the file of this card, or write one with megarl doctor --measure"
        yield on_node(node, "warning", "placement.hardware", problem, mend)
    elif memory and memory < _DEVICE_SHARE * hardware.memory_bytes:
        problem = f"it plans with {gb(hardware.memory_bytes)} of a GPU, and one has {gb(memory)}"
        yield on_node(node, "warning", "placement.hardware", problem, "correct memory_bytes in the file")
    if node.host_bytes < _HOST_SHARE * hardware.host_bytes:
        problem = f"it plans with {gb(hardware.host_bytes)} of host memory, and the node has {gb(node.host_bytes)}"
        yield on_node(node, "warning", "placement.hardware", problem, "correct host_bytes in the file")


def _fp8(recipe: Recipe, node: NodeFacts) -> Iterator[Finding]:
    if not recipe.rollout.engine.fp8:
        return
    for gpu in node.gpus:
        major, _, minor = gpu.compute_capability.partition(".")
        if major.isdigit() and minor.isdigit() and (int(major), int(minor)) < _FP8_CAPABILITY:
            problem = f"GPU {gpu.index} ({gpu.name}) has no float8 (compute capability {gpu.compute_capability})"
            mend = "set it to false, or book newer GPUs"
            yield on_node(node, "fault", "rollout.engine.fp8", problem, mend)
