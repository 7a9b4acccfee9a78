"""Which ranks and which engine are on each GPU slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.parallel.engine_layout import EngineLayout
from megarl.parallel.layout import RankCoords
from megarl.parallel.roles import RoleName
from megarl.plan.model_size import ModelSize


@dataclass(frozen=True)
class Slot:
    """One GPU. ranks: the coordinates of each model's rank on it; engine and engine_rank: None without an engine."""

    slot: int
    node: int
    gpu: int
    ranks: Mapping[RoleName, RankCoords]
    engine: int | None
    engine_rank: int | None


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a model: the slots of its ranks, and its decoder layers."""

    stage: int
    slots: range
    layers: tuple[int, ...]


def slot_map(recipe: Recipe, sizes: Mapping[RoleName, ModelSize], engine: EngineLayout) -> tuple[Slot, ...]:
    """Every slot in order."""
    found = []
    for slot in range(recipe.placement.gpus):
        ranks: dict[RoleName, RankCoords] = {
            role: size.layout.coords(slot - size.first_slot) for role, size in sizes.items() if slot in size.slots
        }
        node, gpu = divmod(slot, recipe.placement.gpus_per_node)
        found.append(Slot(slot, node, gpu, ranks, *(engine.member(slot) or (None, None))))
    return tuple(found)


def pipeline_stages(size: ModelSize) -> list[Stage]:
    """A model's stages in order; the ranks of a stage are neighbours, because pp is the slowest axis."""
    layout, width = size.layout, size.layout.world_size // size.layout.pp
    return [
        Stage(
            stage,
            size.slots[stage * width : (stage + 1) * width],
            tuple(layer for chunk in range(layout.vpp) for layer in layout.layers(stage, size.shape.num_layers, chunk)),
        )
        for stage in range(layout.pp)
    ]


def spans(numbers: Iterable[int]) -> str:
    """Rising numbers as "0-3, 8, 10-11"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"
