"""From a recipe to everything that can be known before a GPU is booked: who sits where, bytes, batches, seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.parallel.placement import engine_layout, shared_slots
from megarl.parallel.roles import resolve
from megarl.plan.activations import item_bytes
from megarl.plan.advice import cache_advice
from megarl.plan.batch import MEAN_RESPONSE_SHARE, Samples, Share, advice, share_of, step_samples
from megarl.plan.engine_memory import weight_bytes
from megarl.plan.faults import plan_faults
from megarl.plan.fit import memory
from megarl.plan.model_size import ModelSize, Role, model_sizes
from megarl.plan.phase_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, MemoryPlan, counted, state_bytes
from megarl.plan.reshard_cost import ReshardPlan, plan_reshard
from megarl.plan.rollout_time import RolloutTime, engine_speed, rollout_time
from megarl.plan.slots import Slot, Stage, slot_map, spans, stages
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
from megarl.resharding.shards import LayoutError
from megarl.types import UserFault, UserFaults


@dataclass(frozen=True)
class RunPlan:
    """All of it. By model: policy, critic, reward_model. faults: what does not fit; without any the recipe does.

    layouts: of each model its first slot and how its ranks lie from there on. response_share: the mean response, of the
    longest.
    """

    recipe: Recipe
    hardware: Hardware
    response_share: float
    sizes: Mapping[Role, ModelSize]
    engine: EngineLayout
    slots: tuple[Slot, ...]
    stages: tuple[Stage, ...]
    memory: MemoryPlan
    samples: Samples
    shares: Mapping[str, Share]
    advice: tuple[str, ...]
    reshard: ReshardPlan
    rollout: RolloutTime
    learning: Mapping[str, TrainTime]
    step: StepTime
    faults: tuple[UserFault, ...]

    @property
    def policy(self) -> ModelSize:
        return self.sizes["policy"]

    @property
    def layouts(self) -> dict[str, tuple[int, TrainLayout]]:
        return {role: (size.first_slot, size.layout) for role, size in self.sizes.items()}

    def alike(self) -> list[list[str]]:
        """The models in groups of those that lie on the same slots in the same way."""
        found: dict[tuple[int, TrainLayout], list[str]] = {}
        for model, where in self.layouts.items():
            found.setdefault(where, []).append(model)
        return list(found.values())

    @property
    def num_nodes(self) -> int:
        return self.slots[-1].node + 1

    @property
    def fits(self) -> bool:
        return not self.faults

    @property
    def peak_phase(self) -> str:
        return max(self.memory.device, key=lambda phase: self.memory.device[phase].total_bytes)

    @property
    def title(self) -> str:
        """The recipe in one line."""
        size, recipe = self.policy, self.recipe
        active = f" ({amount(size.active_parameters / 1e9)} B active)" if size.shape.num_experts else ""
        model = f"{amount(size.parameters / 1e9)} B parameters{active}"
        nodes = f"{self.num_nodes} nodes" if self.num_nodes > 1 else "1 node"
        where = f"{recipe.placement.gpus} {self.hardware.name} in {nodes}"
        return f"{recipe.run.name}: {recipe.algorithm.name}, {model}, on {where}"

    @property
    def verdict(self) -> str:
        """Whether it fits, in one line."""
        fullest = self.memory.device[self.peak_phase].total_bytes / self.hardware.memory_bytes
        fills = f"{fullest:.0%} of a GPU in {self.peak_phase}, its fullest phase"
        if not self.fits:
            return f"does not fit: {fills}"
        return f"fits: {fills}; {amount(self.step.total_s)} s a step (an estimate)"

    def axes_of(self, model: str) -> str:
        """A model's parallel sizes in one line."""
        layout = self.layouts[model][1]
        dense = f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"
        expert = f", experts etp {layout.etp} x ep {layout.ep} x edp {layout.edp}" if self._has_experts(model) else ""
        return f"{dense}{f' (vpp {layout.vpp})' if layout.vpp > 1 else ''}{expert}"

    def _has_experts(self, model: str) -> bool:
        return any(role == model and size.shape.num_experts for role, size in self.sizes.items())

    @property
    def engines_words(self) -> str:
        """The engines in one line."""
        engine, kind = self.engine, "fp8" if self.engine.fp8 else self.recipe.model.dtype
        dp = f", dp {engine.dp}" if engine.dp > 1 else ""
        slots = spans(range(engine.first, engine.end))
        return f"{engine.count} of tp {engine.tp}, ep {engine.ep}{dp} in {kind} on slots {slots}"

    @property
    def phases(self) -> list[tuple[str, float, dict[str, float]]]:
        """(name, seconds, the seconds of its parts) of a step, in order; without those that take none."""
        step, rollout = self.step, self.rollout
        of_rollout = {"reading prompts": rollout.prefill_s, "its last half-empty stretch": rollout.tail_s}
        of_learning = {
            model: {name.removesuffix("_s").replace("_", " "): value for name, value in asdict(times).items()}
            for model, times in self.learning.items()
        }
        found = [
            ("rollout", step.rollout_s, of_rollout),
            ("score", step.score_s, {}),
            ("critic", step.critic_s, of_learning.get("critic", {})),
            ("train", step.train_s, of_learning["policy"]),
            ("reshard", step.reshard_s, {}),
            ("save", step.save_s, {}),
        ]
        return [phase for phase in found if phase[1]]

    def to_json(self) -> dict[str, Any]:
        """The same as one JSON object; docs/plan.md lists its keys."""
        samples, size = self.samples, self.policy
        return {
            "name": self.recipe.run.name,
            "fits": self.fits,
            "faults": [{"where": one.where, "problem": one.problem, "mend": one.mend} for one in self.faults],
            "hardware": self.hardware.model_dump(),
            "model": {"parameters": size.parameters, "active_parameters": size.active_parameters},
            "ranks": [_slot_json(slot) for slot in self.slots],
            "memory": self._memory_json(),
            "batch": {
                "prompts": samples.prompts,
                "drawn_prompts": samples.drawn_prompts,
                "samples": samples.num_trained,
                "tokens": int(samples.lengths.sum()),
                "longest_tokens": samples.longest,
                "mean_response_share": self.response_share,
                "models": {model: asdict(share) for model, share in self.shares.items()},
                "advice": list(self.advice),
            },
            "kv": asdict(self.memory.kv),
            "rollout": asdict(self.rollout),
            "reshard": asdict(self.reshard),
            "learning": {model: asdict(times) for model, times in self.learning.items()},
            "step": asdict(self.step) | {"total_s": self.step.total_s},
        }

    def _memory_json(self) -> dict[str, Any]:
        return {
            "capacity_bytes": self.hardware.memory_bytes,
            "peak_phase": self.peak_phase,
            "device": {
                phase: asdict(parts) | {"total_bytes": parts.total_bytes}
                for phase, parts in self.memory.device.items()
            },
            "fullest_slot": self.memory.fullest_slot,
            "slot_bytes": self.memory.slot_bytes,
            "host": self.memory.host,
            "host_bytes": self.memory.host_bytes,
            "host_capacity_bytes": self.memory.host_capacity_bytes,
        }


def amount(value: float) -> str:
    """A number of three digits, or all of those before the point: 1,339 42.1 3.01 0.305 0."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 6 else f"{value:.1e}"


def _slot_json(slot: Slot) -> dict[str, Any]:
    ranks = {model: asdict(at) for model, at in slot.ranks.items()}
    return {name: value for name, value in vars(slot).items() if name != "ranks"} | ranks


def make_plan(recipe: Recipe, hardware: Hardware, response_share: float = MEAN_RESPONSE_SHARE) -> RunPlan:
    """Plan a recipe. Raises UserFaults where its keys or layouts leave nothing to plan; what is too large is in it."""
    recipe, _ = stand_ins(recipe)
    faults = plan_faults(resolve(recipe))
    if faults:
        raise UserFaults(faults)
    sizes, engine = model_sizes(recipe), engine_layout(recipe)
    policy = sizes["policy"]
    samples = step_samples(recipe, response_share)
    try:
        reshard = plan_reshard(recipe, policy.shape, policy.layout, engine, hardware)
    except LayoutError as error:  # tiles of fp8 that training ranks cut
        mend = "choose sizes of train that do not, or set rollout.engine.fp8 to false"
        raise UserFault("rollout.engine.fp8", str(error), mend) from None
    shares = {role: share_of(size.recipe, size.shape, size.layout, samples) for role, size in sizes.items()}
    mean_tokens, micro_batches = math.ceil(samples.lengths.mean()), math.ceil(shares["policy"].micro_batches)
    held = memory(recipe, hardware, sizes, mean_tokens=mean_tokens, micro_batches=micro_batches)
    layouts = {role: (size.first_slot, size.layout) for role, size in sizes.items()}
    rollout = _rollout(recipe, policy, engine, hardware, held, samples)
    learning, step = _times(recipe, hardware, sizes, shares, samples, rollout.total_s, reshard.expected_s)

    def tried(changed: Recipe) -> tuple[MemoryPlan, float]:
        """What is held, and a rollout's seconds, with other engines."""
        own: dict[Role, ModelSize] = {**sizes, "policy": replace(policy, recipe=changed)}
        room = counted(changed, hardware, own, mean_tokens=mean_tokens, micro_batches=micro_batches)
        return room, _rollout(changed, policy, engine_layout(changed), hardware, room, samples).total_s

    return RunPlan(
        recipe=recipe,
        hardware=hardware,
        response_share=response_share,
        sizes=sizes,
        engine=engine,
        slots=slot_map(recipe, layouts, engine),
        stages=tuple(
            stage
            for role, size in sizes.items()
            for stage in stages(role, size.first_slot, size.layout, size.shape.num_layers)
        ),
        memory=held,
        samples=samples,
        shares=shares,
        advice=(
            *advice(recipe, policy.layout, engine.count, samples),
            *cache_advice(recipe, sizes, held, step.total_s - rollout.total_s, tried),
        ),
        reshard=reshard,
        rollout=rollout,
        learning=learning,
        step=step,
        faults=tuple(held.faults),
    )


def _rollout(
    recipe: Recipe,
    policy: ModelSize,
    engine: EngineLayout,
    hardware: Hardware,
    held: MemoryPlan,
    samples: Samples,
) -> RolloutTime:
    if learns_from_answers(recipe.algorithm.name):  # nobody samples
        return RolloutTime(0.0, 0.0, 0.0, 0, 0.0)
    speed = engine_speed(
        policy.shape,
        engine,
        hardware,
        recipe.placement.gpus_per_node,
        recipe.model.dtype,
        weight_bytes=fmean(weight_bytes(policy.shape, engine, recipe.model.dtype)),
        kv_bytes=held.kv.token_bytes,
    )
    return rollout_time(speed, samples, held.kv.concurrency_mean)


def _times(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[Role, ModelSize],
    shares: Mapping[str, Share],
    samples: Samples,
    rollout_s: float,
    reshard_s: float,
) -> tuple[dict[str, TrainTime], StepTime]:
    node = recipe.placement.gpus_per_node
    sides = [size.slots for size in sizes.values()]
    engine = engine_layout(recipe)
    shared = shared_slots([*sides, range(engine.first, engine.end)])
    models = {role: _model(size, shares[role], bool(shared & set(size.slots))) for role, size in sizes.items()}
    learning = {"policy": policy_time(recipe, models["policy"], samples, hardware, node)}
    score_s = critic_s = 0.0
    if "critic" in models:
        learning["critic"] = critic_time(models["critic"], samples, hardware, node)
        critic_s = learning["critic"].total_s
    if "reward_model" in models:
        one = models["reward_model"]
        score_s = memory_s(one, hardware) + forward_s(one, samples, hardware)
    nodes = -(-recipe.placement.gpus // node)
    saved = sum(
        save_s(recipe, models[role], hardware, nodes, size.parameters)
        for role, size in sizes.items()
        if size.trains
    )
    return learning, StepTime(rollout_s, score_s, critic_s, learning["policy"].total_s, reshard_s, saved)


def _model(size: ModelSize, share: Share, takes_turns: bool) -> ComputingModel:
    """One role's model as the formulas of time want it, with the bytes of its fullest stage's ranks."""
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
