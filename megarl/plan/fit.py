"""Whether a recipe fits into its GPUs and hosts, and which key to change for it, or for more room in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.config.models import TrainConfig
from megarl.model.shape import ModelShape
from megarl.placement.recomputation import cleared_fields, ladder, recomputed_parts
from megarl.placement.roles import Roles, engine_layout, precision_of, resolve
from megarl.placement.train_layout import divisors
from megarl.plan.model_size import ModelSizes, resized, sizes_of
from megarl.plan.optimizer_memory import smaller_states
from megarl.plan.phase_memory import COMPUTES, MemoryPlan
from megarl.plan.step_time import StepTime
from megarl.preflight.layout_checks import engine_errors, node_errors, slot_errors
from megarl.preflight.lora_checks import lora_errors
from megarl.preflight.phase_checks import phase_errors
from megarl.preflight.prefix_checks import prefix_errors
from megarl.rollout.sglang.drafts import draft_errors
from megarl.types import UserError

GB = 1e9
HOST = "host"
_BRANCHES = {
    "train": "train",
    "critic": "critic.ranks",
    "score": "reward_model.ranks",
}
RANKS_OF_LONGEST = (2, 4)  # tried with `cp: auto`
_LEAST_FRACTION = 0.3
_FRACTION_STEP = 0.05

_NUM_TRIED = 3  # numbers of attention groups: each costs a count of the memory and a rollout
_WORTH_IT = 0.95  # of a step's seconds now; less than that is inside the estimate's own error

_Values = dict[str, Any]  # by dotted key
Count = Callable[[Recipe, ModelSizes], MemoryPlan]
TryEngines = Callable[[Recipe], tuple[MemoryPlan, StepTime]]
OptimizerSeconds = Callable[[Recipe], float]


@dataclass
class _Change:
    """Other values of a few keys. memory: that of the changed recipe, once it is counted."""

    original: Recipe
    values: Mapping[str, Any]
    counted: MemoryPlan | None = None

    @property
    def words(self) -> str:
        """As `a.b to 1, a.c to 2 and d.e to 3`."""
        *others, last = [f"{key} to {_yaml(value)}" for key, value in self.values.items()]
        return f"{', '.join(others)} and {last}" if others else last

    @cached_property
    def recipe(self) -> Recipe:
        recipe = self.original
        for key, value in self.values.items():
            recipe = _updated(recipe, key.split("."), value)
        return recipe

    def error(self, problem: str, hint: str) -> UserError:
        return UserError(next(iter(self.values)), problem, hint)

    @property
    def changes_optimizer(self) -> bool:
        """Whether AdamW's state gets other types or another place."""
        return not self.values.keys().isdisjoint(("train.optimizer", "train.optimizer_offload"))

    @cached_property
    def roles(self) -> Roles:
        return resolve(self.recipe)

    @property
    def memory(self) -> MemoryPlan:
        assert self.counted
        return self.counted

    @property
    def lacking(self) -> list[str]:
        """The phases that do not fit with it."""
        return lacking(self.recipe, self.memory)

    @property
    def room(self) -> float:
        """The share of a step's sequences that engines hold at once."""
        return self.memory.kv.concurrency_mean / self.memory.kv.wanted


def with_errors(
    recipe: Recipe,
    hardware: Hardware,
    sizes: ModelSizes,
    count: Count,
    optimizer_s: OptimizerSeconds,
) -> MemoryPlan:
    """The recipe's memory, with an error for each phase that does not fit.

    count: the memory of a recipe. optimizer_s: the seconds of a step that the policy's AdamW takes in a recipe of the
    same layouts. Changes are tried by counting the memory again. Those that need models to be built again are tried
    only where no other change is enough.
    """
    plan = count(recipe, sizes)
    changes: dict[str, _Change] = {}  # by their words: phases have some in common
    by_phase: dict[str, list[_Change]] = {}
    for phase in lacking(recipe, plan):
        valid = [change for change in _changes(recipe, phase) if are_valid(change.roles)]
        by_phase[phase] = [changes.setdefault(change.words, change) for change in valid]
    for change in changes.values():
        if same := resized(sizes, change.roles.models):
            change.counted = count(change.recipe, same)
    for phase, tried in by_phase.items():
        helping = [change for change in tried if change.counted and phase not in change.lacking]
        by_phase[phase] = helping or tried
    tried_by_words = {change.words: change for tried in by_phase.values() for change in tried}
    to_build = [change for change in tried_by_words.values() if not change.counted]
    if to_build:
        built = sizes_of([change.roles.models for change in to_build], whole=False)
        for change, built_sizes in zip(to_build, built, strict=True):
            change.counted = count(change.recipe, built_sizes)
    errors = [_error(recipe, hardware, plan, *pair, optimizer_s) for pair in by_phase.items()]
    return replace(plan, errors=errors)


def _error(
    recipe: Recipe,
    hardware: Hardware,
    plan: MemoryPlan,
    phase: str,
    tried: Sequence[_Change],
    optimizer_s: OptimizerSeconds,
) -> UserError:
    """Names the cheapest change that makes the phase fit, and most other phases; if none does, that which helps most.

    A change that leaves the KV cache less than half of the room that another change leaves it is passed over. A change
    of the optimizer's state comes with the seconds of its steps.
    """
    problem = _problem(recipe, hardware, plan, phase)
    if not tried:
        return UserError("placement.gpus", problem, "use more GPUs, or cards with more memory")
    fitting = [change for change in tried if phase not in change.lacking]
    if not fitting:
        change = min(tried, key=lambda change: _gigabytes(change.memory, phase))
        most = f"{change.words}: {_gigabytes(change.memory, phase):.1f} GB"
        return change.error(problem, f"nothing alone is enough; most helps to set {most}")
    fewest = min(len(change.lacking) for change in fitting)
    best = [change for change in fitting if len(change.lacking) == fewest]
    most_room = max(change.room for change in best)
    change = next(change for change in best if change.room >= most_room / 2)
    kv = change.memory.kv
    left = f"{_gigabytes(change.memory, phase):.1f} GB, and an engine has room for {kv.concurrency_mean} sequences"
    hint = f"set {change.words}: then it is {left} of {kv.wanted}"
    if change.changes_optimizer:
        host = _updated(recipe, ["train", "optimizer_offload"], True)
        hint += f"; AdamW takes {optimizer_s(change.recipe):.2g} s a step"
        if not change.recipe.train.optimizer_offload:
            hint += f", on the host {optimizer_s(host):.2g} s"
    return change.error(problem, hint)


def _problem(recipe: Recipe, hardware: Hardware, plan: MemoryPlan, phase: str) -> str:
    needed = _gigabytes(plan, phase)
    if phase == HOST:
        largest = max(plan.host, key=plan.host.__getitem__)
        of_it = f"{plan.host[largest] / GB:.0f} GB of it {largest.replace('_', ' ')}"
        capacity = plan.host_capacity_bytes / GB
        return f"a node's host would hold {needed:.1f} GB, {of_it}, and has {capacity:.1f} GB"
    if phase == "rollout" and plan.device[phase].total_bytes <= plan.capacity_bytes:
        room = f"the rollout phase leaves an engine room for {plan.kv.tokens} tokens of KV cache"
        return f"{room} on {hardware.name}, and one sequence may have {recipe.longest_sequence}"
    parts = plan.device[phase].by_name()
    largest = max(parts, key=parts.__getitem__)
    of_it = f"{parts[largest] / GB:.1f} GB of it {largest.replace('_', ' ')}"
    slot = f"GPU slot {plan.fullest_slot[phase]}, {of_it}"
    capacity = f"{hardware.name} has {plan.capacity_bytes / GB:.1f} GB"
    return f"the {phase} phase takes {needed:.1f} GB of {slot}; {capacity}"


def _gigabytes(plan: MemoryPlan, phase: str) -> float:
    if phase == HOST:
        return plan.host_bytes / GB
    return plan.device[phase].total_bytes / GB


def lacking(recipe: Recipe, plan: MemoryPlan) -> list[str]:
    """The phases that do not fit, and the host."""
    return [phase for phase in (*plan.device, HOST) if _lacks(recipe, plan, phase)]


def _lacks(recipe: Recipe, plan: MemoryPlan, phase: str) -> bool:
    """Whether a phase does not fit; an engine of the run must have room for one sequence of the longest."""
    if phase == HOST:
        return plan.host_bytes > plan.host_capacity_bytes
    has_engines = not recipe.rollout.engine.external
    if (
        has_engines
        and phase == "rollout"
        and plan.kv.tokens // recipe.rollout.engine.dp < recipe.longest_sequence
    ):
        return True
    return plan.device[phase].total_bytes > plan.capacity_bytes


def are_valid(roles: Roles) -> bool:
    """Whether models, slots and nodes take the layouts of roles and engines.

    With drafts, phases, adapters and shared prefixes.
    """
    if roles.overlap_errors() or prefix_errors(roles):
        return False
    if any(role.layout_errors() for role in roles.models.values()) or draft_errors(roles.recipe):
        return False
    if phase_errors(roles) or lora_errors(roles) or slot_errors(roles) or node_errors(roles):
        return False
    return not engine_errors(roles, roles.policy.shape, "cuda")


def _changes(recipe: Recipe, phase: str) -> Iterator[_Change]:
    """Changes that may help a phase, the cheapest first."""
    if phase in _BRANCHES:
        changes = _training_changes(recipe, phase)
    elif phase == HOST:
        changes = _host_changes(recipe)
    elif recipe.rollout.engine.external:
        changes = iter(())
    else:
        changes = _engine_changes(recipe, phase)
    for values in (*changes, *_more_gpus(recipe)):
        # another number of stages makes the stages even
        for key in [key for key in values if key.endswith(".pp")]:
            if recipe.train.layers_per_stage:
                values[f"{key.removesuffix('pp')}layers_per_stage"] = ()
        yield _Change(recipe, values)


def cheapest_help(recipe: Recipe, phase: str) -> str:
    """The keys to change first where a phase needs less memory, as `a.b to 1`; "" where none is known."""
    changes = (change for change in _changes(recipe, phase) if are_valid(change.roles))
    return next((change.words for change in changes), "")


def split_budget(recipe: Recipe, ranks: int) -> int:
    """The tokens of a micro-batch with which `cp: auto` splits the longest sequence over so many ranks."""
    return -(-recipe.longest_sequence // (2 * ranks)) * 2


def _training_changes(recipe: Recipe, phase: str) -> Iterator[_Values]:
    branch = _BRANCHES[phase]
    models = resolve(recipe).models
    train = models[COMPUTES.get(phase, "policy")].recipe.train
    align = models["policy"].layout.tokens_align
    least = -(-recipe.longest_sequence // align) * align
    if least < train.tokens_per_micro_batch:
        yield {f"{branch}.tokens_per_micro_batch": least}
    if phase in ("train", "critic"):
        num_stages = max(role.layout.pp for role in models.values() if role.trains)
        yield from _recompute_changes(models["policy"].shape, train, num_stages)
    has_adamw = train.optimizer_name == "adamw"
    if phase != "score" and has_adamw and not train.optimizer_offload:
        for options in smaller_states(recipe):
            if options != train.optimizer:
                yield {"train.optimizer": options}
        yield {"train.optimizer_offload": True}
    for ranks in RANKS_OF_LONGEST:
        budget = split_budget(recipe, ranks)
        if phase != "score" and budget < train.tokens_per_micro_batch:
            yield {f"{branch}.cp": "auto", f"{branch}.tokens_per_micro_batch": budget}
    for axis in ("ep", "pp", "tp", "cp"):
        for times in (2, 4):
            size = getattr(train, axis)
            if size != "auto":
                yield {f"{branch}.{axis}": times * size}


def _recompute_changes(shape: ModelShape, train: TrainConfig, num_stages: int) -> Iterator[_Values]:
    """More of the layers computed again than now, step by step, by all pipeline ranks."""
    steps = ladder(shape)
    now = [recomputed_parts(train, stage) for stage in range(num_stages)]
    # from the rank that computes least again
    least = min(steps.index(parts) if parts in steps else 0 for parts in now)
    for parts in steps[least + 1 :]:
        # the value replaces the key
        values: _Values = {"train.recompute": dict.fromkeys(sorted(parts), num_stages)}
        if cleared := cleared_fields(train):
            values["train.megatron"] = train.megatron | cleared
        yield values


def _engine_changes(recipe: Recipe, phase: str) -> Iterator[_Values]:
    engine = recipe.rollout.engine
    fraction = engine.sglang.get("mem_fraction_static")
    if phase == "rollout" and fraction is not None:
        steps = range(1, round((fraction - _LEAST_FRACTION) / _FRACTION_STEP) + 1)
        lower = [round(fraction - step * _FRACTION_STEP, 3) for step in steps]
        higher = [value for value in (0.85, 0.9, 0.93) if value > fraction]
        for value in (*lower, *higher):
            yield {"rollout.engine.sglang": {**engine.sglang, "mem_fraction_static": value}}
    if phase == "reshard":
        for share in (2, 4, 8):
            yield {"reshard.round_bytes": recipe.reshard.round_bytes // share}
    if engine.weights == "plain":
        in_fp8: _Values = {"rollout.engine.weights": "fp8"}
        # for samples of other probabilities than the trainer's
        if not recipe.algorithm.corrects_engine:
            in_fp8["algorithm.rollout_correction"] = "tis"
        yield in_fp8
    for times in (2, 4):
        if engine.count % times == 0:
            yield {
                "rollout.engine.tp": engine.tp * times,
                "rollout.engine.count": engine.count // times,
                "rollout.engine.ep": engine.ep * times if engine.ep > 1 else 1,
            }
    for axis in ("ep", "pp"):
        yield {f"train.{axis}": 2 * getattr(recipe.train, axis)}


def _host_changes(recipe: Recipe) -> Iterator[_Values]:
    if recipe.checkpoint.memory_copies:
        yield {"checkpoint.memory_copies": False}
    if recipe.checkpoint.every and recipe.checkpoint.asynchronous:
        yield {"checkpoint.asynchronous": False}
    if recipe.train.optimizer_offload:
        yield {"train.optimizer_offload": False}
        for options in smaller_states(recipe):
            yield {"train.optimizer_offload": False, "train.optimizer": options}
    if recipe.reference.use:
        yield {"reference.use": False}


def _more_gpus(recipe: Recipe) -> Iterator[_Values]:
    """And as many times the engines; not where training or engines have slots of their own."""
    placement = recipe.placement
    if placement.train_gpus or placement.first_engine_gpu:
        return
    for times in (2, 4):
        values: _Values = {"placement.gpus": placement.gpus * times}
        if not recipe.rollout.engine.external:
            values["rollout.engine.count"] = recipe.rollout.engine.count * times
        yield values


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        items = [f"{key}: {_yaml(item)}" for key, item in value.items() if item is not None]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def _updated(branch: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a recipe, or of a branch of it, with another value of the key at `path`."""
    first, *rest = path
    if rest:
        value = _updated(getattr(branch, first), rest, value)
    return branch.model_copy(update={first: value})


def cache_advice(
    recipe: Recipe, shape: ModelShape, memory: MemoryPlan, try_engines: TryEngines
) -> list[str]:
    """What gives the KV cache more room, if most of a step's sequences wait for it.

    shape: of the policy. try_engines: the memory and the step of a recipe that has other engines.
    """
    cache = memory.kv
    engine = recipe.rollout.engine
    if (
        memory.errors
        or cache.concurrency_mean >= cache.wanted / 2
        or learns_from_answers(recipe.algorithm.name)
    ):
        return []
    knobs = []
    in_fp8 = replace(engine_layout(recipe), precision=precision_of(recipe, "fp8"))
    is_plain = engine.weights == "plain"
    if is_plain and not (recipe.lora or in_fp8.errors(shape, recipe.placement.gpus)):
        knobs = ["rollout.engine.weights fp8 halves the weights beside it"]
    groups = _best_groups(recipe, shape, memory, try_engines)
    if groups:
        dp, step_s = groups
        knobs.insert(0, f"rollout.engine.dp {dp} would make it {step_s:,.0f} s a step")
    elif not shape.mla and shape.num_kv_heads < engine.tp // engine.dp:
        knobs.insert(
            0, f"rollout.engine.tp {shape.num_kv_heads} at most: more ranks hold the same heads"
        )
    now = f"{cache.concurrency_mean} of {cache.wanted} sequences at once"
    return [
        f"rollout.engine: the KV cache has room for {now}; {'; '.join(knobs) or 'more engines would have more'}"
    ]


def _best_groups(
    recipe: Recipe, shape: ModelShape, memory: MemoryPlan, try_engines: TryEngines
) -> tuple[int, float] | None:
    """(dp, seconds of a step) of the next larger numbers of groups; None: none of them is faster than now."""
    seconds_by_dp: dict[int, float] = {}
    engine = recipe.rollout.engine
    for dp in [dp for dp in divisors(engine.tp) if dp > engine.dp][:_NUM_TRIED]:
        changed = _updated(recipe, ["rollout", "engine", "dp"], dp)
        if engine_layout(changed).errors(shape, recipe.placement.gpus):
            continue
        room, step = try_engines(changed)
        fits = room.peak_bytes <= room.capacity_bytes
        if (
            fits
            and room.kv.concurrency_longest
            and room.kv.concurrency_mean > memory.kv.concurrency_mean
        ):
            seconds_by_dp[dp] = step.total_s
    best = min(seconds_by_dp, key=lambda dp: seconds_by_dp[dp], default=None)
    if best is None or seconds_by_dp[best] > _WORTH_IT * try_engines(recipe)[1].total_s:
        return None
    return best, seconds_by_dp[best]
