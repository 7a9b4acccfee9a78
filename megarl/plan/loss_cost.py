"""The seconds that a run loses when an engine, a training rank, a node or all of it dies, besides starting processes.

Estimates like those of step_time.py: what dies does so in the middle of a phase, or between two checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.plan.model_size import ModelSize
from megarl.plan.muon_cost import SECOND_MOMENT_BYTES
from megarl.plan.optimizer_memory import MASTER_BYTES, MOMENTS_BYTES
from megarl.plan.step_time import StepTime

_OPTIMIZER_BYTES = MASTER_BYTES + MOMENTS_BYTES


@dataclass(frozen=True)
class LossCost:
    """Mean seconds that are lost with an engine in its rollout, a rank or a node in its training, and all processes.

    source: of a rank's state, "copies" or "checkpoint". All but engine_s are None without either.
    """

    engine_s: float
    rank_s: float | None
    node_s: float | None
    restart_s: float | None
    source: str


def loss_cost(
    recipe: Recipe,
    hardware: Hardware,
    models: Iterable[ModelSize],
    step: StepTime,
    engine_bytes: float,
) -> LossCost:
    """models: those that train. engine_bytes: of the engine's weights on a GPU."""
    models = [model for model in models if model.trains]
    count = recipe.rollout.engine.count
    # its share of a phase is sampled again by all, and it is missed until it has weights
    copy_s = engine_bytes / hardware.nic_reached_per_s if count > 1 else step.reshard_s
    engine_s = (step.rollout_s / 2 + copy_s) / count
    every = recipe.checkpoint.every
    has_copies = recipe.checkpoint.memory_copies and recipe.run.restarts > 0
    training_again_s = step.learning_s / 2
    restart_s = None
    if every:
        nodes = recipe.placement.gpus / recipe.placement.gpus_per_node
        saved_bytes = sum(model.parameters * (2 + _OPTIMIZER_BYTES) for model in models)
        load_s = saved_bytes / (nodes * hardware.disk_bytes_per_s)
        restart_s = load_s + step.reshard_s + every / 2 * step.total_s
    if has_copies:
        state_bytes = sum(map(_state_bytes, models))
        return LossCost(
            engine_s=engine_s,
            rank_s=state_bytes / hardware.pcie_bytes_per_s + training_again_s,
            node_s=state_bytes / hardware.nic_reached_per_s + training_again_s,
            restart_s=restart_s,
            source="copies",
        )
    rank_s = restart_s
    if every == 1:
        # the step's samples are kept
        rank_s = load_s + training_again_s
    return LossCost(
        engine_s=engine_s,
        rank_s=rank_s,
        node_s=rank_s,
        restart_s=restart_s,
        source="checkpoint",
    )


def _state_bytes(model: ModelSize) -> float:
    """Of a rank of the fullest stage."""
    return max(
        model.trained(stage) * model.weight_bytes
        + model.optimizer_share(stage) * _OPTIMIZER_BYTES
        - model.muon(stage).elements * SECOND_MOMENT_BYTES
        for stage in range(model.layout.pp)
    )
