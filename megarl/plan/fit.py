"""Whether a recipe fits into its GPUs and hosts, and which key to change for it, or for more room in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.model.shape import ModelShape
from megarl.placement.roles import RoleName, Roles, engine_layout, resolve
from megarl.placement.train_layout import divisors
from megarl.plan.model_size import ModelSize, resized, sizes_of
from megarl.plan.phase_memory import COMPUTES, SAVE, MemoryPlan
from megarl.plan.step_time import StepTime
from megarl.preflight.layout_checks import slot_errors
from megarl.preflight.lora_checks import lora_errors
from megarl.preflight.phase_checks import phase_errors
from megarl.types import UserError

GB = 1e9
HOST = "host"
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_BRANCHES = {
    "train": "train",
    SAVE: "train",
    "critic": "critic.ranks",
    "score": "reward_model.ranks",
}
_LEAST_FRACTION = 0.3
_FRACTION_STEP = 0.05

_NUM_TRIED = 3  # numbers of attention groups: each costs a count of the memory and a rollout
_WORTH_IT = 0.95  # of a step's seconds now; less than that is inside the estimate's own error

Count = Callable[[Recipe, Mapping[RoleName, ModelSize]], MemoryPlan]
TryEngines = Callable[[Recipe], tuple[MemoryPlan, StepTime]]


@dataclass(frozen=True)
class _Change:
    """A change of one key and of what depends on it: the key, the change in words, and the changed recipe."""

    key: str
    words: str
    recipe: Recipe

    @cached_property
    def roles(self) -> Roles:
        return resolve(self.recipe)


def with_errors(
    recipe: Recipe, hardware: Hardware, sizes: Mapping[RoleName, ModelSize], count: Count
) -> MemoryPlan:
    """The recipe's memory, with an error for each phase that does not fit. count: the memory of a recipe.

    Changes are tried by counting the memory again. Those that need models to be built again are tried only where no
    other change is enough.
    """
    plan = count(recipe, sizes)
    by_phase = {
        phase: list(filter(_is_valid, _changes(recipe, phase))) for phase in lacking(recipe, plan)
    }
    plans: dict[str, MemoryPlan] = {}
    for change in chain.from_iterable(by_phase.values()):
        same = resized(sizes, change.roles.models)
        if same is not None and change.words not in plans:
            plans[change.words] = count(change.recipe, same)
    for phase, tried in by_phase.items():
        counted = [change for change in tried if change.words in plans]
        fits = [
            change for change in counted if not _lacks(change.recipe, plans[change.words], phase)
        ]
        by_phase[phase] = fits or tried
    to_build = {
        change.words: change
        for tried in by_phase.values()
        for change in tried
        if change.words not in plans
    }
    if to_build:
        built = sizes_of([change.roles.models for change in to_build.values()], whole=False)
    else:
        built = []
    plans |= {
        words: count(to_build[words].recipe, found)
        for words, found in zip(to_build, built, strict=True)
    }
    errors = [
        _error(recipe, hardware, plan, phase, [(change, plans[change.words]) for change in tried])
        for phase, tried in by_phase.items()
    ]
    return replace(plan, errors=errors)


def _error(
    recipe: Recipe,
    hardware: Hardware,
    plan: MemoryPlan,
    phase: str,
    tried: Sequence[tuple[_Change, MemoryPlan]],
) -> UserError:
    """Names the cheapest change that makes the phase fit, and most other phases; if none does, that which helps most.

    A change that leaves the KV cache less than half of the room that another change leaves it is passed over.
    """
    problem = _problem(recipe, hardware, plan, phase)
    fitting = [
        (change, found) for change, found in tried if not _lacks(change.recipe, found, phase)
    ]
    if fitting:
        fewest = min(len(lacking(change.recipe, found)) for change, found in fitting)
        best = [
            (change, found)
            for change, found in fitting
            if len(lacking(change.recipe, found)) == fewest
        ]
        most_room = max(_room(found) for _, found in best)
        change, found = next(
            (change, found) for change, found in best if _room(found) >= most_room / 2
        )
        left = f"{_bytes(found, phase) / GB:.1f} GB, and an engine has room for {found.kv.concurrency_mean} sequences"
        return UserError(
            change.key, problem, f"set {change.words}: then it is {left} of {found.kv.wanted}"
        )
    if not tried:
        return UserError("placement.gpus", problem, "use more GPUs, or cards with more memory")
    change, found = min(tried, key=lambda pair: _bytes(pair[1], phase))
    most = f"{_bytes(found, phase) / GB:.1f} GB"
    return UserError(
        change.key, problem, f"nothing alone is enough; most helps to set {change.words}: {most}"
    )


def _room(plan: MemoryPlan) -> float:
    """The share of a step's sequences that engines hold at once."""
    return plan.kv.concurrency_mean / plan.kv.wanted


def _problem(recipe: Recipe, hardware: Hardware, plan: MemoryPlan, phase: str) -> str:
    needed = f"{_bytes(plan, phase) / GB:.1f} GB"
    if phase == HOST:
        parts = plan.host
    else:
        parts = plan.device[phase].by_name()
    largest = max(parts, key=lambda name: parts[name])
    if phase == HOST:
        of_it = f"{parts[largest] / GB:.0f} GB of it {largest.replace('_', ' ')}"
        return f"a node's host would hold {needed}, {of_it}, and has {plan.host_capacity_bytes / GB:.1f} GB"
    if phase == "rollout" and _bytes(plan, phase) <= plan.capacity_bytes:
        room = f"the rollout phase leaves an engine room for {plan.kv.tokens} tokens of KV cache"
        return f"{room} on {hardware.name}, and one sequence may have {recipe.longest_sequence}"
    of_it = f"{parts[largest] / GB:.1f} GB of it {largest.replace('_', ' ')}"
    capacity = f"{hardware.name} has {plan.capacity_bytes / GB:.1f} GB"
    return f"the {phase} phase takes {needed} of GPU slot {plan.fullest_slot[phase]}, {of_it}; {capacity}"


def _bytes(plan: MemoryPlan, phase: str) -> int:
    if phase == HOST:
        return plan.host_bytes
    return plan.device[phase].total_bytes


def lacking(recipe: Recipe, plan: MemoryPlan) -> list[str]:
    """The phases that do not fit, and the host."""
    return [phase for phase in (*plan.device, HOST) if _lacks(recipe, plan, phase)]


def _lacks(recipe: Recipe, plan: MemoryPlan, phase: str) -> bool:
    """Whether a phase does not fit; an engine must have room for one sequence of the longest."""
    if phase == HOST:
        return plan.host_bytes > plan.host_capacity_bytes
    if phase == "rollout" and plan.kv.tokens // recipe.rollout.engine.dp < recipe.longest_sequence:
        return True
    return plan.device[phase].total_bytes > plan.capacity_bytes


def _is_valid(change: _Change) -> bool:
    """Whether the layouts of all roles and the engines fit the models and the slots."""
    roles = change.roles
    if any(role.layout_errors() for role in roles.models.values()):
        return False
    engine_errors = roles.engines.errors(roles.policy.shape, change.recipe.placement.gpus)
    return not (engine_errors or slot_errors(roles) or phase_errors(roles) or lora_errors(roles))


def _changes(recipe: Recipe, phase: str) -> Iterator[_Change]:
    """Changes that may help a phase, the cheapest first."""
    if phase in _BRANCHES:
        yield from _training_changes(recipe, phase)
    elif phase == HOST:
        yield from _host_changes(recipe)
    else:
        yield from _engine_changes(recipe, phase)
    yield from _more_gpus(recipe)


def _training_changes(recipe: Recipe, phase: str) -> Iterator[_Change]:
    branch = _BRANCHES[phase]
    models = resolve(recipe).models
    train = models[COMPUTES.get(phase, "policy")].recipe.train
    align = models["policy"].layout.tokens_align
    least = -(-recipe.longest_sequence // align) * align
    if phase != SAVE and least < train.tokens_per_micro_batch:
        yield _set(recipe, f"{branch}.tokens_per_micro_batch", least)
    if phase in ("train", "critic") and train.megatron.get("recompute_granularity") != "full":
        yield _set(
            recipe, "train.megatron", {**train.megatron, **RECOMPUTE, "recompute_modules": None}
        )
    if phase != "score" and not train.optimizer_offload:
        yield _set(recipe, "train.optimizer_offload", True)
    for axis in ("ep", "pp", "tp", "cp"):
        for times in (2, 4):
            yield _set(recipe, f"{branch}.{axis}", times * getattr(train, axis))


def _engine_changes(recipe: Recipe, phase: str) -> Iterator[_Change]:
    engine = recipe.rollout.engine
    where = "rollout.engine"
    fraction = engine.sglang.get("mem_fraction_static")
    if phase == "rollout" and fraction is not None:
        steps = range(1, round((fraction - _LEAST_FRACTION) / _FRACTION_STEP) + 1)
        lower = [round(fraction - step * _FRACTION_STEP, 3) for step in steps]
        higher = [value for value in (0.85, 0.9, 0.93) if value > fraction]
        for value in (*lower, *higher):
            yield _set(recipe, f"{where}.sglang", {**engine.sglang, "mem_fraction_static": value})
    if phase == "reshard":
        for share in (2, 4, 8):
            yield _set(recipe, "reshard.round_bytes", recipe.reshard.round_bytes // share)
    if not engine.fp8:
        yield _in_fp8(recipe)
    for times in (2, 4):
        ep = engine.ep * times if engine.ep > 1 else 1
        update = {"tp": engine.tp * times, "count": engine.count // times, "ep": ep}
        if engine.count % times == 0:
            words = (
                f"rollout.engine.tp to {update['tp']}, count to {update['count']} and ep to {ep}"
            )
            yield _Change(f"{where}.tp", words, _updated(recipe, where, update))
    for axis in ("ep", "pp"):
        yield _set(recipe, f"train.{axis}", 2 * getattr(recipe.train, axis))


def _in_fp8(recipe: Recipe) -> _Change:
    """With the correction for samples of other probabilities than the trainer's."""
    change = _set(recipe, "rollout.engine.fp8", True)
    if recipe.algorithm.rollout_correction not in (None, "off"):
        return change
    words = f"{change.words} and algorithm.rollout_correction to tis"
    return replace(
        change,
        words=words,
        recipe=_updated(change.recipe, "algorithm", {"rollout_correction": "tis"}),
    )


def _host_changes(recipe: Recipe) -> Iterator[_Change]:
    if recipe.checkpoint.every and recipe.checkpoint.asynchronous:
        yield _set(recipe, "checkpoint.asynchronous", False)
    if recipe.train.optimizer_offload:
        yield _set(recipe, "train.optimizer_offload", False)
    if recipe.reference.use:
        yield _set(recipe, "reference.use", False)


def _more_gpus(recipe: Recipe) -> Iterator[_Change]:
    """And as many times the engines; not where training or engines have slots of their own."""
    placement = recipe.placement
    engine = recipe.rollout.engine
    if placement.train_gpus or placement.first_engine_gpu:
        return
    for times in (2, 4):
        more = _updated(recipe, "placement", {"gpus": placement.gpus * times})
        more = _updated(more, "rollout.engine", {"count": engine.count * times})
        words = f"placement.gpus to {placement.gpus * times} and rollout.engine.count to {engine.count * times}"
        yield _Change("placement.gpus", words, more)


def _set(recipe: Recipe, key: str, value: Any) -> _Change:
    """Another number of stages makes the stages even."""
    branch, _, name = key.rpartition(".")
    update = {name: value}
    words = f"{key} to {_yaml(value)}"
    if name == "pp" and recipe.train.layers_per_stage:
        update["layers_per_stage"] = ()
        words += f" and {branch}.layers_per_stage to []"
    return _Change(key, words, _updated(recipe, branch, update))


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items() if item is not None)
            + "}"
        )
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _updated(branch: Any, path: str, values: Mapping[str, Any]) -> Any:
    """A copy of a recipe, or of a branch of it, in which the branch at `path` has other values."""
    if not path:
        return branch.model_copy(update=dict(values))
    first, _, rest = path.partition(".")
    return branch.model_copy(update={first: _updated(getattr(branch, first), rest, values)})


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
    if engine.fp8 or recipe.lora:
        knobs = []
    else:
        knobs = ["rollout.engine.fp8 true halves the weights beside it"]
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
    found: dict[int, float] = {}
    engine = recipe.rollout.engine
    for dp in [dp for dp in divisors(engine.tp) if dp > engine.dp][:_NUM_TRIED]:
        changed = _updated(recipe, "rollout.engine", {"dp": dp})
        if engine_layout(changed).errors(shape, recipe.placement.gpus):
            continue
        room, step = try_engines(changed)
        fits = room.device[room.peak_phase].total_bytes <= room.capacity_bytes
        if (
            fits
            and room.kv.concurrency_longest
            and room.kv.concurrency_mean > memory.kv.concurrency_mean
        ):
            found[dp] = step.total_s
    best = min(found, key=lambda dp: found[dp], default=None)
    if best is None or found[best] > _WORTH_IT * try_engines(recipe)[1].total_s:
        return None
    return best, found[best]
