"""Which other engines would give the KV cache more room, and what a step would then take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.parallel.layout import divisors
from megarl.parallel.placement import engine_layout
from megarl.plan.model_size import ModelSize, Role
from megarl.plan.phase_memory import MemoryPlan

_NUM_TRIED = 3  # numbers of attention groups: each costs a count of the memory and a rollout
_WORTH_IT = 0.95  # of the rollout's seconds now; less than that is inside the estimate's own error


def cache_advice(
    recipe: Recipe,
    sizes: Mapping[Role, ModelSize],
    held: MemoryPlan,
    other_s: float,
    tried: Callable[[Recipe], tuple[MemoryPlan, float]],
) -> list[str]:
    """Where the KV cache keeps most of a step's sequences waiting: what gives it room.

    other_s: seconds of a step without its rollout. tried: what is held with another recipe, and its rollout's seconds.
    """
    cache, engine, shape = held.kv, recipe.rollout.engine, sizes["policy"].shape
    if held.faults or cache.concurrency_mean >= cache.wanted / 2 or learns_from_answers(recipe.algorithm.name):
        return []
    knobs = [] if engine.fp8 else ["rollout.engine.fp8 true halves the weights beside it"]
    groups = _best_groups(recipe, sizes, held, tried)
    if groups:
        dp, rollout_s = groups
        knobs.insert(0, f"rollout.engine.dp {dp} would make it {other_s + rollout_s:,.0f} s a step")
    elif not shape.mla and shape.num_kv_heads < engine.tp // engine.dp:
        knobs.insert(0, f"rollout.engine.tp {shape.num_kv_heads} at most: more ranks hold the same heads")
    now = f"{cache.concurrency_mean} of {cache.wanted} sequences at once"
    return [f"rollout.engine: the KV cache has room for {now}; {'; '.join(knobs) or 'more engines would have more'}"]


def _best_groups(
    recipe: Recipe,
    sizes: Mapping[Role, ModelSize],
    held: MemoryPlan,
    tried: Callable[[Recipe], tuple[MemoryPlan, float]],
) -> tuple[int, float] | None:
    """(dp, seconds of the rollout) of the next larger numbers of groups; None: none of them is faster than now."""
    found: dict[int, float] = {}
    for dp in [one for one in divisors(recipe.rollout.engine.tp) if one > recipe.rollout.engine.dp][:_NUM_TRIED]:
        engine = recipe.rollout.engine.model_copy(update={"dp": dp})
        changed = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": engine})})
        if engine_layout(changed).faults(sizes["policy"].shape, recipe.placement.gpus):
            continue
        room, found_s = tried(changed)
        fits = max(parts.total_bytes for parts in room.device.values()) <= room.capacity_bytes
        if fits and room.kv.concurrency_longest and room.kv.concurrency_mean > held.kv.concurrency_mean:
            found[dp] = found_s
    best = min(found, key=lambda dp: found[dp], default=None)
    if best is None or found[best] > _WORTH_IT * tried(recipe)[1]:
        return None
    return best, found[best]
