"""Which GPU slots a recipe gives to training and which to the engines."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.types import UserFault


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


def engine_layout(recipe: Recipe) -> EngineLayout:
    """The engines, from slot `first` on."""
    engine = recipe.rollout.engine
    first = recipe.placement.first_engine_gpu
    return EngineLayout(engine.count, engine.tp, engine.ep, engine.dp, engine.fp8, first)


def shared_slots(train: TrainLayout, engine: EngineLayout) -> range:
    """The slots on which both sides sit, and take turns with the memory."""
    return range(engine.first, max(engine.first, min(train.world_size, engine.end)))


def slot_faults(gpus: int, train: TrainLayout, engine: EngineLayout) -> list[UserFault]:
    """Slots that do not exist, or that nobody uses. (Engines beyond the last slot: EngineLayout.faults.)"""
    found = []
    if train.world_size > gpus:
        problem = f"{train.world_size} is more than placement.gpus ({gpus})"
        found.append(UserFault("placement.train_gpus", problem, f"set it to at most {gpus}"))
    if engine.first > train.world_size:
        problem = f"{engine.first} leaves GPUs idle behind the {train.world_size} that train"
        found.append(UserFault("placement.first_engine_gpu", problem, f"set it to at most {train.world_size}"))
    used = max(train.world_size, engine.end)
    if used < gpus and not found:
        problem = f"{gpus} GPUs, of which training and the engines use the first {used}"
        found.append(UserFault("placement.gpus", problem, f"set it to {used}"))
    return found
