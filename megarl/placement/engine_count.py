"""How many engines a run may have while it goes on."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.types import UserError

_KEY = "rollout.engine.max_count"
_AGAIN = "and start the run again with --resume"


def count_error(recipe: Recipe, count: int) -> UserError | None:
    """Why a run of this recipe, which has passed preflight, cannot have so many engines; None: it can."""
    engine = recipe.rollout.engine
    placement = recipe.placement
    if engine.external:
        problem = "the run samples through servers that others have started"
        return UserError(
            "rollout.engine.external", problem, "name others there, and resume the run"
        )
    if engine.max_count:
        if 1 <= count <= engine.max_count:
            return None
        problem = f"{count} engines, and the run has GPUs for 1 to {engine.max_count} ({_KEY})"
        return UserError("--count", problem, "ask for as many")
    problem = f"is not set in the run's recipe, so that it keeps its {engine.count} engines"
    hint = f"set it, with GPUs for so many engines in placement.gpus, {_AGAIN}"
    if placement.first_engine_gpu < (placement.train_gpus or placement.gpus):
        problem += ", which share GPUs with training ranks"
        hint = f"give the engines GPUs of their own (placement.first_engine_gpu), set it, {_AGAIN}"
    return UserError(_KEY, problem, hint)
