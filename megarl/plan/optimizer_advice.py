"""Whether AdamW's state, which a recipe keeps on the host, would fit on the GPU in smaller types; what that saves."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.parallel.option_values import has_bfloat16_moments
from megarl.placement.roles import resolve
from megarl.plan.fit import are_valid, lacking
from megarl.plan.optimizer_memory import smaller_states
from megarl.plan.phase_memory import MemoryPlan
from megarl.plan.rollout_time import RolloutTime
from megarl.plan.step_time import StepTime

_LEAST_SAVED = 0.01  # of a step's seconds; the estimates differ in the optimizer alone

# A recipe with another state of the optimizer -> its memory, and a step without its rollout.
TryStates = Callable[[Recipe], tuple[MemoryPlan, StepTime]]


def optimizer_advice(
    recipe: Recipe, memory: MemoryPlan, rollout: RolloutTime, try_states: TryStates
) -> list[str]:
    """The first of `smaller_states` that fits on the GPU, and the seconds that it saves; one sentence or none.

    Of these states the one without rounding is the first, moments in bfloat16 are the second. The rollout is the
    recipe's own, so a state that leaves the KV cache less room is passed over.
    """
    if not recipe.train.optimizer_offload:
        return []
    now_s = try_states(recipe)[1].with_rollout(rollout).total_s
    for options in smaller_states(recipe):
        values = {"optimizer_offload": False, "optimizer": options}
        changed = overlaid(recipe, {"train": values})
        if not are_valid(resolve(changed)):
            continue
        room, step = try_states(changed)
        if lacking(changed, room) or room.kv.tokens < memory.kv.tokens:
            continue
        saved_s = now_s - step.with_rollout(rollout).total_s
        if saved_s < _LEAST_SAVED * now_s:
            return []
        state = "moments in bfloat16" if has_bfloat16_moments(options) else "masters as remainders"
        words = ", ".join(f"{key}: {_yaml(value)}" for key, value in options.items())
        where = f"train.optimizer_offload false with train.optimizer {{{words}}}"
        return [f"{where} ({state}) would fit, and save {saved_s:.2g} of {now_s:,.0f} s a step"]
    return []


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
