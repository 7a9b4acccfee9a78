"""What an overlay makes of a recipe's memory and seconds, by the functions of a plan; for many overlays of one recipe.

Models are not built again: their sizes are added up from parts. What several overlays have in common is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.config.loading import overlaid
from megarl.parallel.option_values import has_bfloat16_moments
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.flex_dispatcher import is_flex
from megarl.placement.roles import Role, RoleName, Roles, resolve
from megarl.plan.batch import RankWork, Samples, share_of
from megarl.plan.candidates import Overlay
from megarl.plan.engine_simulation import GroupLimits
from megarl.plan.fit import HOST, lacking
from megarl.plan.layer_sizes import LayerSizes, composed
from megarl.plan.model_size import ModelSize, ModelSizes, resized
from megarl.plan.phase_memory import MemoryPlan, cannot_train, plan_memory
from megarl.plan.rollout_time import RolloutTime, rough_rollout_s
from megarl.plan.run_plan import engine_speed, group_limits, rollout_of
from megarl.plan.step_time import step_times

# of a GPU's and a host's memory that a candidate leaves free: nothing of the plan's memory was measured
SPARE = 0.05


Need = Literal["fp8", "fp8_cache", "fp8_training", "deepep", "draft", "offload", "moments"]
Needs = frozenset[Need]


def needs_of(recipe: Recipe) -> Needs:
    """What a recipe needs besides GPUs.

    fp8, fp8_cache: a correction of the samples' probabilities; fp8_training: gradients by products in fp8, and fp8
    engines; deepep: its kernels; draft: an MTP layer; offload: host memory; moments: a beta2 that is not near 1.
    """
    engine = recipe.rollout.engine
    needs: dict[Need, bool] = {
        "fp8": engine.weights == "fp8",
        "fp8_cache": str(engine.sglang.get("kv_cache_dtype")).startswith("fp8"),
        "fp8_training": recipe.train.numbers == "engine",
        "deepep": engine.experts == "deepep" or is_flex(recipe.train),
        "draft": engine.draft > 0,
        "offload": recipe.train.optimizer_offload,
        "moments": not recipe.train.optimizer_offload
        and has_bfloat16_moments(recipe.train.optimizer),
    }
    return frozenset(need for need, is_needed in needs.items() if is_needed)


@dataclass(frozen=True)
class Estimate:
    """An overlay, the recipe with it, and its memory; the seconds are computed when they are asked for."""

    overlay: Overlay
    roles: Roles
    sizes: ModelSizes
    shares: Mapping[RoleName, RankWork]
    memory: MemoryPlan
    estimator: Estimator

    @property
    def recipe(self) -> Recipe:
        return self.roles.recipe

    @cached_property
    def needs(self) -> Needs:
        return needs_of(self.recipe)

    @cached_property
    def step_s(self) -> float:
        """All seconds of a step but the reshard's."""
        of = self.estimator
        _, step = step_times(
            self.roles, of.hardware, self.sizes, self.shares, of.samples, reshard_s=0.0
        )
        return step.with_rollout(of.rollout(self.roles, self.memory)).total_s

    @property
    def rough_rollout_s(self) -> float:
        """About the seconds of the rollout, without a simulation."""
        of = self.estimator
        speed = engine_speed(self.roles, of.hardware, self.memory)
        return rough_rollout_s(speed, of.samples, self.memory.kv.concurrency_mean)

    def fits(self, phases: Collection[str] | None = None) -> bool:
        """Whether these phases, or all of them and the host, fit with `SPARE` left."""
        memory = self.memory
        phase_names = {*memory.device, HOST} if phases is None else {*phases}
        taken = {phase: parts.total_bytes for phase, parts in memory.device.items()}
        most = dict.fromkeys(taken, memory.capacity_bytes) | {HOST: memory.host_capacity_bytes}
        taken[HOST] = memory.host_bytes
        if not phase_names.isdisjoint(lacking(self.recipe, memory)):
            return False
        return all(
            taken[phase] <= (1 - SPARE) * most[phase] for phase in phase_names & taken.keys()
        )


@dataclass
class Estimator:
    """Estimates of one recipe. sizes: of its own models. parts: of other training layouts, see `layer_sizes`."""

    recipe: Recipe
    hardware: Hardware
    samples: Samples
    sizes: ModelSizes
    parts: Mapping[tuple[RoleName, int], LayerSizes] = field(default_factory=dict)
    _shares: dict[tuple[object, ...], RankWork] = field(default_factory=dict)
    _rollouts: dict[tuple[EngineLayout, GroupLimits, float], RolloutTime] = field(
        default_factory=dict
    )

    def estimate(self, overlay: Overlay) -> Estimate:
        """The layouts must have no error."""
        roles = resolve(overlaid(self.recipe, overlay))
        sizes = self.sizes_of(roles)
        shares: dict[RoleName, RankWork] = {
            name: self._share(role) for name, role in roles.models.items()
        }
        memory = plan_memory(roles.recipe, self.hardware, sizes, self.samples, shares["policy"])
        return Estimate(overlay, roles, sizes, shares, memory, self)

    def rough_train_s(self, overlay: Overlay) -> float | None:
        """About the seconds of a step without its rollout, by one update's samples.

        None: an overlap is refused in this layout, or some model's rank does not fit a GPU while it learns.
        """
        roles = resolve(overlaid(self.recipe, overlay))
        if roles.overlap_errors():
            return None
        sizes = self.sizes_of(roles)
        shares: dict[RoleName, RankWork] = {
            name: self._share(role, whole=False) for name, role in roles.models.items()
        }
        micro_batches = math.ceil(shares["policy"].micro_batches)
        if cannot_train(sizes, micro_batches, self.hardware.memory_bytes):
            return None
        _, step = step_times(roles, self.hardware, sizes, shares, self.samples, reshard_s=0.0)
        return step.total_s

    def sizes_of(self, roles: Roles) -> dict[RoleName, ModelSize]:
        """The sizes of all models in their layouts."""
        return resized(self.sizes, roles.models) or composed(self.sizes, roles.models, self.parts)

    def _share(self, role: Role, *, whole: bool = True) -> RankWork:
        """whole: of all updates of a step; otherwise of as many samples as one update has, which takes less long."""
        layout = role.layout
        train = role.recipe.train
        axes = (layout.dp, layout.tokens_align, layout.batch_multiple, layout.bubble_micro_batches)
        axes += (layout.cp, layout.max_cp)
        key = (role.name, train.tokens_per_micro_batch, *axes, whole)
        if key not in self._shares:
            recipe = role.recipe
            samples = self.samples
            updates = train.updates_per_step
            if not whole:
                samples = replace(samples, num_trained=max(1, samples.num_trained // updates))
                recipe = overlaid(recipe, {"train": {"updates_per_step": 1}})
            self._shares[key] = replace(
                share_of(recipe, role.shape, layout, samples), updates=updates
            )
        return self._shares[key]

    def rollout(self, roles: Roles, memory: MemoryPlan) -> RolloutTime:
        """As `rollout_of`."""
        limits = group_limits(roles.recipe, self.hardware, memory)
        key = roles.engines, limits, memory.kv.token_bytes
        if key not in self._rollouts:
            self._rollouts[key] = rollout_of(roles, self.hardware, memory, self.samples)
        return self._rollouts[key]
