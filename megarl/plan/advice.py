"""Which other engines would give the KV cache more room, and what a step would then take."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.parallel.layout import divisors
from megarl.parallel.placement import engine_layout
from megarl.plan.fit import updated
from megarl.plan.phase_memory import MemoryPlan
from megarl.types import ModelShape

TryEngines = Callable[[Recipe], tuple[MemoryPlan, float]]
_NUM_TRIED = 3  # numbers of attention groups: each costs a count of the memory and a rollout
_WORTH_IT = 0.95  # of the rollout's seconds now; less than that is inside the estimate's own error


def cache_advice(
    recipe: Recipe, shape: ModelShape, memory: MemoryPlan, other_s: float, try_engines: TryEngines
) -> list[str]:
    """What gives the KV cache more room, if most of a step's sequences wait for it.

    shape: of the policy. other_s: seconds of a step without its rollout. try_engines: the memory of a recipe that has
    other engines, and the seconds of its rollout.
    """
    cache, engine = memory.kv, recipe.rollout.engine
    if memory.faults or cache.concurrency_mean >= cache.wanted / 2 or learns_from_answers(recipe.algorithm.name):
        return []
    knobs = [] if engine.fp8 else ["rollout.engine.fp8 true halves the weights beside it"]
    groups = _best_groups(recipe, shape, memory, try_engines)
    if groups:
        dp, rollout_s = groups
        knobs.insert(0, f"rollout.engine.dp {dp} would make it {other_s + rollout_s:,.0f} s a step")
    elif not shape.mla and shape.num_kv_heads < engine.tp // engine.dp:
        knobs.insert(0, f"rollout.engine.tp {shape.num_kv_heads} at most: more ranks hold the same heads")
    now = f"{cache.concurrency_mean} of {cache.wanted} sequences at once"
    return [f"rollout.engine: the KV cache has room for {now}; {'; '.join(knobs) or 'more engines would have more'}"]


def _best_groups(
    recipe: Recipe, shape: ModelShape, memory: MemoryPlan, try_engines: TryEngines
) -> tuple[int, float] | None:
    """(dp, seconds of the rollout) of the next larger numbers of groups; None: none of them is faster than now."""
    found: dict[int, float] = {}
    engine = recipe.rollout.engine
    for dp in [dp for dp in divisors(engine.tp) if dp > engine.dp][:_NUM_TRIED]:
        changed = updated(recipe, "rollout.engine", {"dp": dp})
        if engine_layout(changed).faults(shape, recipe.placement.gpus):
            continue
        room, found_s = try_engines(changed)
        fits = room.device[room.peak_phase].total_bytes <= room.capacity_bytes
        if fits and room.kv.concurrency_longest and room.kv.concurrency_mean > memory.kv.concurrency_mean:
            found[dp] = found_s
    best = min(found, key=lambda dp: found[dp], default=None)
    if best is None or found[best] > _WORTH_IT * try_engines(recipe)[1]:
        return None
    return best, found[best]
