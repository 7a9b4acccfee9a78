"""Whether a recipe fits into its GPUs and hosts, phase by phase, and which knob helps where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.parallel.placement import train_layout
from megarl.parallel.roles import resolve
from megarl.plan.model_size import ModelSize, Role, model_sizes, resized, roles, sizes_of
from megarl.plan.phase_memory import SAVE, MemoryPlan, Parts, counted
from megarl.preflight.layout import slot_faults
from megarl.types import UserFault

__all__ = ["MemoryPlan", "Parts", "memory"]
GB = 1e9
HOST = "host"
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BRANCHES = {"train": "train", SAVE: "train", "critic": "critic.ranks", "score": "reward_model.ranks"}
_LEAST_FRACTION, _FRACTION_STEP = 0.3, 0.05


@dataclass(frozen=True)
class _Change:
    """One knob turned: the key, what to write there (with what has to change with it), and the recipe that makes."""

    key: str
    words: str
    recipe: Recipe


def memory(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[Role, ModelSize] | None = None,
    *,
    mean_tokens: int | None = None,
    micro_batches: int | None = None,
) -> MemoryPlan:
    """The whole plan, with a fault for each phase that does not fit; the recipe's layouts must have no fault.

    sizes: of `model_sizes`, if they are known. mean_tokens: of prompt and response together, for the number of
    sequences that an engine holds at once. micro_batches: of an update; None: at least as many as fill the pipeline.
    """

    def count(changed: Recipe, found: Mapping[Role, ModelSize]) -> MemoryPlan:
        return counted(changed, hardware, found, mean_tokens=mean_tokens, micro_batches=micro_batches)

    sizes = sizes or model_sizes(recipe)
    plan = count(recipe, sizes)
    full = _lacking(recipe, plan)
    if not full:
        return plan
    return replace(plan, faults=_faults(recipe, hardware, plan, full, sizes, count))


def _faults(
    recipe: Recipe,
    hardware: Hardware,
    plan: MemoryPlan,
    full: Sequence[str],
    sizes: Mapping[Role, ModelSize],
    count: Callable[[Recipe, Mapping[Role, ModelSize]], MemoryPlan],
) -> list[UserFault]:
    """One for each phase that is full; knobs are tried by counting once more.

    Those for which models would have to be built again are tried where none of the others is enough.
    """
    by_phase = {phase: [one for one in _changes(recipe, phase) if _is_valid(one.recipe)] for phase in full}
    plans: dict[str, MemoryPlan] = {}
    for change in (one for tried in by_phase.values() for one in tried):
        same = resized(sizes, change.recipe)
        if same is not None and change.words not in plans:
            plans[change.words] = count(change.recipe, same)
    for phase, tried in by_phase.items():
        fits = [one for one in tried if one.words in plans and not _lacks(one.recipe, plans[one.words], phase)]
        by_phase[phase] = fits or tried
    to_build = {one.words: one for tried in by_phase.values() for one in tried if one.words not in plans}
    built = sizes_of([one.recipe for one in to_build.values()], whole=False) if to_build else []
    plans |= {words: count(one.recipe, found) for (words, one), found in zip(to_build.items(), built, strict=True)}
    return [
        _fault(recipe, hardware, plan, phase, [(one, plans[one.words]) for one in tried])
        for phase, tried in by_phase.items()
    ]


def _fault(
    recipe: Recipe, hardware: Hardware, plan: MemoryPlan, phase: str, tried: Sequence[tuple[_Change, MemoryPlan]]
) -> UserFault:
    """Of the knobs that make the phase fit, and others if they can, the cheapest; else that which helps most.

    One that leaves the KV cache less than half of the room that another one leaves it comes behind that one.
    """
    problem = _problem(recipe, hardware, plan, phase)
    fitting = [one for one in tried if not _lacks(one[0].recipe, one[1], phase)]
    if fitting:
        fewest = min(len(_lacking(change.recipe, found)) for change, found in fitting)
        best = [one for one in fitting if len(_lacking(one[0].recipe, one[1])) == fewest]
        most_room = max(map(_room, best))
        change, found = next(one for one in best if _room(one) >= most_room / 2)
        left = f"{_bytes(found, phase) / GB:.1f} GB, and an engine has room for {found.kv.concurrency_mean} sequences"
        return UserFault(change.key, problem, f"set {change.words}: then it is {left} of {found.kv.wanted}")
    if not tried:
        return UserFault("placement.gpus", problem, "use more GPUs, or cards with more memory")
    change, found = min(tried, key=lambda one: _bytes(one[1], phase))
    most = f"{_bytes(found, phase) / GB:.1f} GB"
    return UserFault(change.key, problem, f"nothing alone is enough; most helps to set {change.words}: {most}")


def _room(one: tuple[_Change, MemoryPlan]) -> float:
    """The share of a step's sequences that engines hold at once."""
    return one[1].kv.concurrency_mean / one[1].kv.wanted


def _problem(recipe: Recipe, hardware: Hardware, plan: MemoryPlan, phase: str) -> str:
    needed = f"{_bytes(plan, phase) / GB:.1f} GB"
    if phase == HOST:
        largest = max(plan.host, key=lambda purpose: plan.host[purpose])
        of_it = f"{plan.host[largest] / GB:.0f} GB of it {largest.replace('_', ' ')}"
        return f"a node's host would hold {needed}, {of_it}, and has {plan.host_capacity_bytes / GB:.1f} GB"
    if phase == "rollout" and _bytes(plan, phase) <= plan.capacity_bytes:
        room = f"the rollout phase leaves an engine room for {plan.kv.tokens} tokens of KV cache"
        return f"{room} on {hardware.name}, and one sequence may have {_longest(recipe)}"
    parts = {name: size for name, size in vars(plan.device[phase]).items() if size}
    largest = max(parts, key=lambda name: parts[name])
    of_it = f"{parts[largest] / GB:.1f} GB of it {largest.removesuffix('_bytes').replace('_', ' ')}"
    capacity = f"{hardware.name} has {plan.capacity_bytes / GB:.1f} GB"
    return f"the {phase} phase takes {needed} of GPU slot {plan.fullest_slot[phase]}, {of_it}; {capacity}"


def _bytes(plan: MemoryPlan, phase: str) -> int:
    return plan.host_bytes if phase == HOST else plan.device[phase].total_bytes


def _lacking(recipe: Recipe, plan: MemoryPlan) -> list[str]:
    """The phases that do not fit, and the host."""
    return [phase for phase in (*plan.device, HOST) if _lacks(recipe, plan, phase)]


def _lacks(recipe: Recipe, plan: MemoryPlan, phase: str) -> bool:
    """Whether a phase does not fit; an engine must have room for one sequence of the longest."""
    if phase == HOST:
        return plan.host_bytes > plan.host_capacity_bytes
    if phase == "rollout" and plan.kv.tokens // recipe.rollout.engine.dp < _longest(recipe):
        return True
    return plan.device[phase].total_bytes > plan.capacity_bytes


def _longest(recipe: Recipe) -> int:
    return recipe.data.max_prompt_tokens + recipe.longest_response


def _is_valid(recipe: Recipe) -> bool:
    """Whether the layouts of all roles and the engines fit the models and the slots."""
    found = resolve(recipe)
    if any(role.layout_faults() for role in found.models.values()):
        return False
    return not (found.engines.faults(found.policy.shape, recipe.placement.gpus) or slot_faults(found))


def _changes(recipe: Recipe, phase: str) -> Iterator[_Change]:
    """The knobs of a phase, the cheapest first."""
    if phase in _BRANCHES:
        yield from _training_changes(recipe, phase, _BRANCHES[phase])
    elif phase == HOST:
        yield from _host_changes(recipe)
    else:
        yield from _engine_changes(recipe, phase)
    yield from _more_gpus(recipe)


def _training_changes(recipe: Recipe, phase: str, branch: str) -> Iterator[_Change]:
    own = {"critic": "critic", "score": "reward_model"}.get(phase, "policy")
    train = next(found for role, found in roles(recipe).items() if role == own).train
    align = train_layout(recipe).tokens_align
    least = -(-_longest(recipe) // align) * align
    if phase != SAVE and least < train.tokens_per_micro_batch:
        yield _set(recipe, f"{branch}.tokens_per_micro_batch", least)
    if phase in ("train", "critic") and train.megatron.get("recompute_granularity") != "full":
        yield _set(recipe, "train.megatron", {**train.megatron, **_RECOMPUTE, "recompute_modules": None})
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
            words = f"rollout.engine.tp to {update['tp']}, count to {update['count']} and ep to {ep}"
            yield _Change(f"{where}.tp", words, _with(recipe, where.split("."), update))
    for axis in ("ep", "pp"):
        yield _set(recipe, f"train.{axis}", 2 * getattr(recipe.train, axis))


def _in_fp8(recipe: Recipe) -> _Change:
    """With what makes up for the samples' other probabilities."""
    change = _set(recipe, "rollout.engine.fp8", True)
    if recipe.algorithm.mismatch not in (None, "off"):
        return change
    words = f"{change.words} and algorithm.mismatch to tis"
    return replace(change, words=words, recipe=_with(change.recipe, ["algorithm"], {"mismatch": "tis"}))


def _host_changes(recipe: Recipe) -> Iterator[_Change]:
    if recipe.checkpoint.every and recipe.checkpoint.asynchronous:
        yield _set(recipe, "checkpoint.asynchronous", False)
    if recipe.train.optimizer_offload:
        yield _set(recipe, "train.optimizer_offload", False)
    if recipe.reference.use:
        yield _set(recipe, "reference.use", False)


def _more_gpus(recipe: Recipe) -> Iterator[_Change]:
    """With as many times more engines; nothing that has slots of its own is moved."""
    placement, engine = recipe.placement, recipe.rollout.engine
    if placement.train_gpus or placement.first_engine_gpu:
        return
    for times in (2, 4):
        more = _with(recipe, ["placement"], {"gpus": placement.gpus * times})
        more = _with(more, ["rollout", "engine"], {"count": engine.count * times})
        words = f"placement.gpus to {placement.gpus * times} and rollout.engine.count to {engine.count * times}"
        yield _Change("placement.gpus", words, more)


def _set(recipe: Recipe, key: str, value: Any) -> _Change:
    """With what depends on it: even stages where their number changes."""
    *path, name = key.split(".")
    update = {name: value}
    words = f"{key} to {_said(value)}"
    if name == "pp" and recipe.train.layers_per_stage:
        update["layers_per_stage"] = ()
        words += f" and {'.'.join(path)}.layers_per_stage to []"
    return _Change(key, words, _with(recipe, path, update))


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_said(one)}" for key, one in value.items() if one is not None) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with(branch: Any, path: Sequence[str], update: Mapping[str, Any]) -> Any:
    """A copy of a branch of the recipe in which the branch at `path` has other values."""
    if not path:
        return branch.model_copy(update=dict(update))
    first, *rest = path
    return branch.model_copy(update={first: _with(getattr(branch, first), rest, update)})
