"""What is wrong with how a recipe's evaluation sets are answered."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.spelling import did_you_mean, near
from megarl.types import UserFault


def eval_faults(recipe: Recipe) -> list[UserFault]:
    """Sets that there are none of, and several samples that would all be the same."""
    faults, names = [], list(recipe.data.eval)
    for name in recipe.evaluation.sets:
        if name not in names:
            mend = did_you_mean(near(name, names), f"name one of {', '.join(names)}" if names else "leave it out")
            faults.append(UserFault(f"evaluation.sets.{name}", "data.eval has no such set", mend))
    for name in names:
        own = recipe.evaluation.of(name)
        if own.samples > 1 and own.temperature == 0:
            given = recipe.evaluation.sets.get(name)
            where = f"evaluation.sets.{name}.samples" if given and given.samples else "evaluation.samples"
            problem = f"{own.samples} greedy answers to a prompt of {name} are the same {own.samples} times"
            faults.append(UserFault(where, problem, "set a temperature, or samples to 1"))
    return faults
