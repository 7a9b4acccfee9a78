"""The plan of a recipe: everything that can be known before a GPU is booked (placement, bytes, batches, seconds)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.parallel.engine_layout import EngineLayout
from megarl.parallel.layout import TrainLayout
from megarl.parallel.roles import RoleName, engine_layout, resolve
from megarl.plan.activations import item_bytes
from megarl.plan.advice import cache_advice
from megarl.plan.batch import MEAN_RESPONSE_SHARE, Samples, Share, advice, share_of, step_samples
from megarl.plan.engine_memory import weight_bytes
from megarl.plan.faults import plan_faults
from megarl.plan.fit import with_faults
from megarl.plan.model_size import ModelSize, sizes_of, time_shared
from megarl.plan.phase_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, MemoryPlan, plan_memory, state_bytes
from megarl.plan.reshard_cost import ReshardPlan, plan_reshard
from megarl.plan.rollout_time import RolloutTime, engine_speed, rollout_time
from megarl.plan.slots import Slot, slot_map
from megarl.plan.step_time import (
    ComputingModel,
    StepTime,
    TrainTime,
    critic_time,
    forward_s,
    memory_s,
    policy_time,
    save_s,
)
from megarl.preflight.stand_ins import stand_ins
from megarl.types import UserFault, UserFaults


@dataclass(frozen=True)
class RunPlan:
    """The whole plan. response_share: the mean response over the longest; sizes, shares, learning: by role."""

    recipe: Recipe
    hardware: Hardware
    response_share: float
    sizes: Mapping[RoleName, ModelSize]
    engine: EngineLayout
    slots: tuple[Slot, ...]
    memory: MemoryPlan
    samples: Samples
    shares: Mapping[RoleName, Share]
    advice: tuple[str, ...]
    reshard: ReshardPlan
    rollout: RolloutTime
    learning: Mapping[RoleName, TrainTime]
    step: StepTime

    def same_placement(self) -> list[list[RoleName]]:
        """The roles in groups of equal slots and equal layouts."""
        found: dict[tuple[int, TrainLayout], list[RoleName]] = {}
        for role, size in self.sizes.items():
            found.setdefault((size.first_slot, size.layout), []).append(role)
        return list(found.values())

    @property
    def num_nodes(self) -> int:
        return self.slots[-1].node + 1

    @property
    def faults(self) -> list[UserFault]:
        """What does not fit into memory."""
        return self.memory.faults

    @property
    def fits(self) -> bool:
        return not self.faults


def make_plan(recipe: Recipe, hardware: Hardware, response_share: float = MEAN_RESPONSE_SHARE) -> RunPlan:
    """Plan a recipe. Raises UserFaults where keys or layouts are wrong; memory that does not fit is in the plan."""
    recipe, _ = stand_ins(recipe)
    roles = resolve(recipe)
    faults, engine = plan_faults(roles), roles.engines
    if faults:
        raise UserFaults(faults)
    sizes = sizes_of([roles.models], whole=True)[0]
    policy = sizes["policy"]
    samples = step_samples(recipe, response_share)
    reshard = plan_reshard(roles, hardware)
    shares: dict[RoleName, Share] = {
        role: share_of(size.recipe, size.shape, size.layout, samples) for role, size in sizes.items()
    }
    mean_tokens, micro_batches = math.ceil(samples.lengths.mean()), math.ceil(shares["policy"].micro_batches)

    def count(changed: Recipe, found: Mapping[RoleName, ModelSize]) -> MemoryPlan:
        return plan_memory(changed, hardware, found, mean_tokens, micro_batches)

    def try_engines(changed: Recipe) -> tuple[MemoryPlan, float]:
        """The memory, and a rollout's seconds, of a recipe that has other engines."""
        room = count(changed, {**sizes, "policy": replace(policy, recipe=changed)})
        return room, _rollout(changed, policy, engine_layout(changed), hardware, room, samples).total_s

    memory = with_faults(recipe, hardware, sizes, count)
    rollout = _rollout(recipe, policy, engine, hardware, memory, samples)
    learning, step = _times(recipe, hardware, sizes, engine, shares, samples, rollout.total_s, reshard.expected_s)
    return RunPlan(
        recipe=recipe,
        hardware=hardware,
        response_share=response_share,
        sizes=sizes,
        engine=engine,
        slots=slot_map(recipe, sizes, engine),
        memory=memory,
        samples=samples,
        shares=shares,
        advice=(
            *advice(recipe, policy.layout, engine.count, samples),
            *cache_advice(recipe, policy.shape, memory, step.total_s - rollout.total_s, try_engines),
        ),
        reshard=reshard,
        rollout=rollout,
        learning=learning,
        step=step,
    )


def _rollout(
    recipe: Recipe,
    policy: ModelSize,
    engine: EngineLayout,
    hardware: Hardware,
    memory: MemoryPlan,
    samples: Samples,
) -> RolloutTime:
    if learns_from_answers(recipe.algorithm.name):  # nothing is sampled
        return RolloutTime(0.0, 0.0, 0.0, 0, 0.0)
    speed = engine_speed(
        policy.shape,
        engine,
        hardware,
        recipe.placement.gpus_per_node,
        recipe.model.dtype,
        weight_bytes=fmean(weight_bytes(policy.shape, engine, recipe.model.dtype)),
        kv_bytes=memory.kv.token_bytes,
    )
    return rollout_time(speed, samples, memory.kv.concurrency_mean)


def _times(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[RoleName, ModelSize],
    engine: EngineLayout,
    shares: Mapping[RoleName, Share],
    samples: Samples,
    rollout_s: float,
    reshard_s: float,
) -> tuple[dict[RoleName, TrainTime], StepTime]:
    node = recipe.placement.gpus_per_node
    shared = time_shared(sizes, engine)
    models = {role: _model(size, shares[role], bool(shared & set(size.slots))) for role, size in sizes.items()}
    learning: dict[RoleName, TrainTime] = {"policy": policy_time(recipe, models["policy"], samples, hardware, node)}
    score_s = critic_s = 0.0
    if "critic" in models:
        learning["critic"] = critic_time(models["critic"], samples, hardware, node)
        critic_s = learning["critic"].total_s
    if "reward_model" in models:
        scorer = models["reward_model"]
        score_s = memory_s(scorer, hardware) + forward_s(scorer, samples, hardware)
    nodes = -(-recipe.placement.gpus // node)
    saved = sum(
        save_s(recipe, models[role], hardware, nodes, size.parameters) for role, size in sizes.items() if size.trains
    )
    return learning, StepTime(rollout_s, score_s, critic_s, learning["policy"].total_s, reshard_s, saved)


def _model(size: ModelSize, share: Share, takes_turns: bool) -> ComputingModel:
    """One role's model with the bytes of the ranks of its fullest stage."""
    options, layout = size.recipe.train, size.layout
    weights = max(sum(chunk.elements for chunk in chunks) for chunks in size.stages)
    trained = max(sum(chunk.trained for chunk in chunks) for chunks in size.stages)
    shards = max(
        sum(chunk.dense / (layout.dp * layout.cp) + chunk.expert / layout.edp for chunk in chunks)
        for chunks in size.stages
    )
    each = MOMENTS_BYTES + MASTER_BYTES if options.optimizer_offload else state_bytes(options, item_bytes(size))
    return ComputingModel(
        shape=size.shape,
        layout=layout,
        share=share,
        recomputes=options.megatron.get("recompute_granularity") == "full",
        offloads=options.optimizer_offload,
        takes_turns=takes_turns,
        weights_bytes=weights * item_bytes(size),
        grads_bytes=trained * GRADIENT_BYTES,
        optimizer_bytes=shards * each,
    )
