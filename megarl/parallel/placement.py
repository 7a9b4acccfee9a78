"""Which GPU slots a recipe gives to its training ranks and which to its engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megarl.parallel.engine_layout import EngineLayout
from megarl.parallel.layout import TrainLayout

if TYPE_CHECKING:
    from megarl.config import Recipe


def train_layout(recipe: Recipe) -> TrainLayout:
    """The training ranks; rank r is on slot r."""
    train, placement = recipe.train, recipe.placement
    return TrainLayout(
        placement.train_gpus or placement.gpus,
        train.tp,
        train.pp,
        train.ep,
        cp=train.cp,
        vpp=train.vpp,
        expert_tp=train.etp or 0,
        stage_layers=train.layers_per_stage,
    )


def is_reporting_rank(layout: TrainLayout, rank: int) -> bool:
    """Whether this rank reports for all ranks with the same samples: the first of the last pipeline stage."""
    at = layout.coords(rank)
    return (at.tp, at.cp, at.pp) == (0, 0, layout.pp - 1)


def engine_layout(recipe: Recipe) -> EngineLayout:
    """The engines, from slot `first` on."""
    engine = recipe.rollout.engine
    first = recipe.placement.first_engine_gpu
    return EngineLayout(engine.count, engine.tp, engine.ep, engine.dp, engine.fp8, first)


def without_reference(recipe: Recipe) -> Recipe:
    """The recipe of ranks that load no reference model."""
    algorithm = recipe.algorithm.model_copy(update={"kl_coefficient": 0.0})
    return recipe.model_copy(update={"reference": type(recipe.reference)(), "algorithm": algorithm})


def shared_slots(sides: Iterable[range]) -> frozenset[int]:
    """The slots that are in several of the ranges: their processes take turns with the memory."""
    seen: set[int] = set()
    shared: set[int] = set()
    for side in sides:
        shared |= seen & set(side)
        seen |= set(side)
    return frozenset(shared)
