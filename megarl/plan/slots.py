"""Who sits where: every GPU slot's node, its place in each training layout, its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.parallel.layout import EngineLayout, RankCoords, TrainLayout


@dataclass(frozen=True)
class Slot:
    """One GPU. ranks: its place in the layout of each model that computes there: policy, critic, reward_model."""

    slot: int
    node: int
    gpu: int
    ranks: Mapping[str, RankCoords]
    engine: int | None
    engine_rank: int | None


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of one model: the slots of its ranks, and its decoder layers."""

    model: str
    stage: int
    slots: range
    layers: tuple[int, ...]


def slot_map(recipe: Recipe, layouts: Mapping[str, tuple[int, TrainLayout]], engine: EngineLayout) -> tuple[Slot, ...]:
    """layouts: of each model its first slot and how its ranks lie from there on."""
    found = []
    for slot in range(recipe.placement.gpus):
        ranks = {
            model: layout.coords(slot - first)
            for model, (first, layout) in layouts.items()
            if first <= slot < first + layout.world_size
        }
        at = engine.member(slot) or (None, None)
        node, gpu = divmod(slot, recipe.placement.gpus_per_node)
        found.append(Slot(slot, node, gpu, ranks, *at))
    return tuple(found)


def stages(model: str, first: int, layout: TrainLayout, num_layers: int) -> list[Stage]:
    """A model's stages in order; the ranks of a stage are neighbours, for pp is the slowest axis."""
    width = layout.world_size // layout.pp
    return [
        Stage(
            model,
            stage,
            range(first + stage * width, first + (stage + 1) * width),
            tuple(layer for chunk in range(layout.vpp) for layer in layout.layers(stage, num_layers, chunk)),
        )
        for stage in range(layout.pp)
    ]


def spans(numbers: tuple[int, ...] | range) -> str:
    """Rising numbers as "0-3, 8, 10-11"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"
