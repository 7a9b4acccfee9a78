"""The plan of a recipe: everything that can be known before a GPU is booked (placement, bytes, batches, seconds)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import Role, RoleName, Roles, resolve
from megarl.placement.train_layout import RankCoords, TrainLayout
from megarl.plan.batch import MEAN_RESPONSE_SHARE, RankWork, Samples, advice, share_of, step_samples
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.engine_memory import settings_of, weight_bytes
from megarl.plan.engine_simulation import CLIPPED, GroupLimits
from megarl.plan.expert_exchange import LinkBytes, exchanged_bytes
from megarl.plan.fit import cache_advice, lacking, with_errors
from megarl.plan.loss_cost import LossCost, loss_cost
from megarl.plan.model_size import ModelSize, ModelSizes, resized, sizes_of
from megarl.plan.optimizer_advice import optimizer_advice
from megarl.plan.phase_advice import TriedPhases, phase_advice
from megarl.plan.phase_memory import MemoryPlan, plan_memory
from megarl.plan.phased_rollout import PhasedRollout, phased_rollout
from megarl.plan.reshard_cost import ReshardPlan, plan_reshard
from megarl.plan.rollout_time import NO_ROLLOUT, RolloutTime, rollout_time
from megarl.plan.step_time import StepTime, TrainTime, step_times
from megarl.plan.turns import ToolLoad, timeout_advice, tool_load
from megarl.preflight.checks_by_command import plan_errors
from megarl.preflight.model_checks import stand_ins
from megarl.rollout.sglang.batch_sizes import limit_of
from megarl.types import UserError, UserErrors
from megarl.types.listed import ErrorIterator, listed

# samples of a step; assigning them takes seconds, and four times as many a minute or more
MOST_SAMPLES = 2**16
MOST_GPUS = 4096


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
class RunPlan:
    """The whole plan. response_share: the mean response over the longest; sizes, shares, learning: by role.

    phases: None where responses are sampled whole and before training; otherwise `rollout` is its `time`.
    """

    recipe: Recipe
    hardware: Hardware
    response_share: float
    sizes: ModelSizes
    engine: EngineLayout
    slots: tuple[Slot, ...]
    memory: MemoryPlan
    samples: Samples
    shares: Mapping[RoleName, RankWork]
    advice: tuple[str, ...]
    reshard: ReshardPlan
    rollout: RolloutTime
    phases: PhasedRollout | None
    learning: Mapping[RoleName, TrainTime]
    step: StepTime

    def same_placement(self) -> list[list[RoleName]]:
        """The roles in groups of equal slots and equal layouts."""
        roles_by_placement: dict[tuple[int, TrainLayout], list[RoleName]] = {}
        for role, size in self.sizes.items():
            roles_by_placement.setdefault((size.first_slot, size.layout), []).append(role)
        return list(roles_by_placement.values())

    @property
    def engines_wait_s(self) -> float:
        """Seconds of a step in which GPUs that only sample have nothing to do; 0: there are none."""
        busy_s = self.rollout.total_s + self.step.reshard_s
        if any(not slot.ranks for slot in self.slots):
            return self.step.total_s - busy_s
        return 0.0

    @property
    def ranks_wait_s(self) -> float:
        """Seconds of a step in which GPUs that only train have nothing to do; 0: there are none."""
        if any(slot.engine is None for slot in self.slots):
            return self.step.rollout_s + self.step.ahead_s
        return 0.0

    @property
    def experts(self) -> dict[str, LinkBytes]:
        """By dispatcher, what a GPU of the policy sends to experts and back in a forward pass over a step's samples.

        Without the prompts that another sample brings.
        """
        policy = self.sizes["policy"]
        share = self.shares["policy"]
        gpus_per_node = self.recipe.placement.gpus_per_node
        shared = share.saved_prompts * self.samples.num_trained * self.samples.prompt_tokens
        tokens = share.updates * share.tokens - shared / policy.layout.dp
        return exchanged_bytes(
            policy.shape, policy.model.facts, policy.layout, gpus_per_node, tokens
        )

    @property
    def losses(self) -> LossCost:
        """What the death of a part costs."""
        engine_bytes = self.reshard.dest_bytes.mean
        return loss_cost(self.recipe, self.hardware, self.sizes.values(), self.step, engine_bytes)

    @property
    def tool_load(self) -> ToolLoad | None:
        """The calls of a step's episodes; None where no tool answers them."""
        return tool_load(self.recipe, self.samples.turns, self.samples.num_drawn)

    @property
    def num_nodes(self) -> int:
        return self.slots[-1].node + 1

    @property
    def spare_nodes(self) -> range:
        """The numbers of the nodes that have no slot until one replaces another."""
        return range(self.num_nodes, self.num_nodes + self.recipe.placement.spare_nodes)

    @property
    def errors(self) -> list[UserError]:
        """What does not fit into memory."""
        return self.memory.errors

    @property
    def fits(self) -> bool:
        return not self.errors


def make_plan(
    recipe: Recipe,
    hardware: Hardware,
    response_share: float = MEAN_RESPONSE_SHARE,
    sizes: ModelSizes | None = None,
    *,
    in_full: bool = True,
) -> RunPlan:
    """Plan a recipe. Raises UserErrors where keys or layouts are wrong; memory that does not fit is in the plan.

    sizes: of all models, where they are known already. in_full: with advice, for which other values of
    keys are tried, and with the rounds of a reshard; a search needs neither.
    """
    if errors := size_errors(recipe):
        raise UserErrors(errors)
    recipe, _ = stand_ins(recipe)
    roles = resolve(recipe)
    if errors := plan_errors(roles):
        raise UserErrors(errors)
    sizes = sizes or sizes_of([roles.models], whole=True)[0]
    samples = step_samples(recipe, response_share)
    reshard = plan_reshard(roles, hardware, counts_rounds=in_full)
    shares: dict[RoleName, RankWork] = {
        role: share_of(size.recipe, size.shape, size.layout, samples)
        for role, size in sizes.items()
    }
    learning, others = step_times(roles, hardware, sizes, shares, samples, reshard.expected_s)
    tries = Tries(hardware, sizes, samples, shares, others)
    memory = with_errors(recipe, hardware, sizes, tries.memory, tries.optimizer_s)
    phases = phased_of(roles, hardware, memory, samples) if is_phased(recipe) else None
    rollout = phases.time if phases else rollout_of(roles, hardware, memory, samples)
    hints = _advice(roles, tries, memory, rollout) if in_full else []
    return RunPlan(
        recipe=recipe,
        hardware=hardware,
        response_share=response_share,
        sizes=sizes,
        engine=roles.engines,
        slots=slot_map(recipe, sizes, roles.engines),
        memory=memory,
        samples=samples,
        shares=shares,
        advice=tuple(hints),
        reshard=reshard,
        rollout=rollout,
        phases=phases,
        learning=learning,
        step=others.with_rollout(rollout),
    )


def _advice(roles: Roles, tries: Tries, memory: MemoryPlan, rollout: RolloutTime) -> list[str]:
    recipe = roles.recipe
    policy = tries.sizes["policy"]
    hints = [
        *advice(recipe, policy.layout, recipe.rollout.engine.count, tries.samples),
        *timeout_advice(recipe, rollout.longest_s(roles.engines.count)),
        *optimizer_advice(recipe, memory, rollout, tries.states),
    ]
    if not recipe.rollout.engine.external:
        hints += cache_advice(recipe, policy.shape, memory, tries.engines)
    if not (memory.errors or recipe.rollout.engine.external):
        may_be_ahead = bool(roles.unshared_engines)
        hints += phase_advice(recipe, tries.phases, may_be_ahead=may_be_ahead)
    return hints


@dataclass(frozen=True)
class Tries:
    """Recipes with other engines, phases or states of the optimizer, and the same layouts of training.

    shares: by role, the ranks' work. others: a step's seconds without its rollout.
    """

    hardware: Hardware
    sizes: ModelSizes
    samples: Samples
    shares: Mapping[RoleName, RankWork]
    others: StepTime

    def memory(self, changed: Recipe, sizes: ModelSizes) -> MemoryPlan:
        return plan_memory(changed, self.hardware, sizes, self.samples, self.shares["policy"])

    def optimizer_s(self, changed: Recipe) -> float:
        """Seconds of a step in which the policy's AdamW steps, or its state crosses PCIe."""
        time = self._training(changed)[0]["policy"]
        return time.memory_s + time.optimizer_s

    def states(self, changed: Recipe) -> tuple[MemoryPlan, StepTime]:
        """With another state of the optimizer; the step is without its rollout."""
        return self.memory(changed, self._sizes_of(changed)), self._training(changed)[1]

    def _training(self, changed: Recipe) -> tuple[dict[RoleName, TrainTime], StepTime]:
        roles = resolve(changed)
        sizes = self._sizes_of(changed)
        reshard_s = self.others.reshard_s
        return step_times(roles, self.hardware, sizes, self.shares, self.samples, reshard_s)

    def _sizes_of(self, changed: Recipe) -> ModelSizes:
        sizes = resized(self.sizes, resolve(changed).models)
        assert sizes  # the layouts are the same
        return sizes

    def phases(self, changed: Recipe) -> TriedPhases | None:
        room = self.memory(changed, self.sizes)
        if lacking(changed, room):
            return None
        rollout = phased_of(resolve(changed), self.hardware, room, self.samples)
        return TriedPhases(changed, rollout, self.others.with_rollout(rollout.time).total_s)

    def engines(self, changed: Recipe) -> tuple[MemoryPlan, StepTime]:
        room = self.memory(changed, self.sizes)
        return room, self.others.with_rollout(
            rollout_of(resolve(changed), self.hardware, room, self.samples)
        )


@listed
def size_errors(recipe: Recipe) -> ErrorIterator:
    """Sizes with which a plan would take hours: it assigns every sample to a micro-batch, and places every GPU."""
    of_prompt = recipe.rollout.samples_per_prompt
    samples = recipe.rollout.prompts_per_step * of_prompt
    if samples > MOST_SAMPLES:
        these = f"these are {samples:,} with {of_prompt} of each prompt"
        problem = f"a plan has at most {MOST_SAMPLES:,} samples a step, and {these}"
        most_prompts = max(1, MOST_SAMPLES // of_prompt)
        hint = f"set it to at most {most_prompts}: time grows with it in proportion"
        yield UserError("rollout.prompts_per_step", problem, hint)
    if recipe.placement.gpus > MOST_GPUS:
        problem = f"a plan has at most {MOST_GPUS:,} GPUs, and these are {recipe.placement.gpus:,}"
        yield UserError("placement.gpus", problem, f"set it to at most {MOST_GPUS}")


def slot_map(
    recipe: Recipe,
    models: Mapping[RoleName, ModelSize] | Mapping[RoleName, Role],
    engine: EngineLayout,
) -> tuple[Slot, ...]:
    """Every slot in order."""
    slots = []
    for slot in range(recipe.placement.gpus):
        ranks: dict[RoleName, RankCoords] = {
            role: model.layout.coords(slot - model.first_slot)
            for role, model in models.items()
            if slot in model.slots
        }
        node, gpu = divmod(slot, recipe.placement.gpus_per_node)
        slots.append(Slot(slot, node, gpu, ranks, *(engine.member(slot) or (None, None))))
    return tuple(slots)


def is_phased(recipe: Recipe) -> bool:
    """Whether a step's samples may be older than its policy, and are drawn by engines whose time is planned."""
    rollout = recipe.rollout
    has_phases = bool(rollout.phase_tokens or rollout.ahead)
    return has_phases and not _samples_elsewhere(recipe)


def rollout_of(
    roles: Roles, hardware: Hardware, memory: MemoryPlan, samples: Samples
) -> RolloutTime:
    """The seconds of a recipe's rollout."""
    recipe = roles.recipe
    if _samples_elsewhere(recipe):
        return NO_ROLLOUT
    if is_phased(recipe):
        return phased_of(roles, hardware, memory, samples).time
    speed = engine_speed(roles, hardware, memory)
    return rollout_time(speed, samples, group_limits(recipe, hardware, memory))


def _samples_elsewhere(recipe: Recipe) -> bool:
    """Whether no engine of the run samples: nothing is sampled, or on GPUs of others, of which nothing is known."""
    return bool(recipe.rollout.engine.external) or learns_from_answers(recipe.algorithm.name)


def phased_of(
    roles: Roles, hardware: Hardware, memory: MemoryPlan, samples: Samples
) -> PhasedRollout:
    """A recipe's rollout in phases, of which there is one where responses are sampled whole."""
    limits = group_limits(roles.recipe, hardware, memory)
    beside = len(roles.unshared_engines)
    speed = engine_speed(roles, hardware, memory)
    return phased_rollout(roles.recipe, speed, samples, limits, beside=beside)


def engine_speed(roles: Roles, hardware: Hardware, memory: MemoryPlan) -> EngineSpeed:
    """The decoding of the recipe's engines."""
    shape = roles.policy.shape
    dtype = roles.recipe.model.dtype
    weights = fmean(weight_bytes(shape, roles.engines, dtype))
    node = roles.recipe.placement.gpus_per_node
    return EngineSpeed(shape, roles.engines, hardware, node, dtype, weights, memory.kv.token_bytes)


def group_limits(recipe: Recipe, hardware: Hardware, memory: MemoryPlan) -> GroupLimits:
    """What each attention group of the recipe's engines can run."""
    engine = recipe.rollout.engine
    kv = memory.kv
    slots = math.ceil(limit_of(recipe, kv.wanted) / engine.dp)
    if kv.most_states is not None:
        slots = max(1, min(slots, kv.most_states))
    return GroupLimits(
        groups=engine.dp,
        slots=slots,
        cache=max(1, kv.tokens // engine.dp),
        longest=recipe.longest_sample,
        chunk=max(1, settings_of(recipe, hardware).chunk_tokens // engine.dp),
        conservativeness=float(engine.sglang.get("schedule_conservativeness", 1.0)),
        most_new=min(CLIPPED, recipe.rollout.max_response_tokens),
    )
