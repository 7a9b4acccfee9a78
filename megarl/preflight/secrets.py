"""Secrets in a recipe: a run saves its recipe in its folder, for everybody who may read that folder."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.tracking.secrets import secrets_in
from megarl.types import UserFault

_MEND = "give the name of an environment variable instead, and let the function read that"


def secret_faults(recipe: Recipe) -> list[UserFault]:
    """Secrets in arguments that are passed through, found by the names of their keys, and passwords in URLs."""
    free = [("reward.arguments", recipe.reward.arguments, _MEND)]
    for source, judge in recipe.reward.by_source.items():
        free.append((f"reward.by_source.{source}.arguments", judge.arguments, _MEND))
    free.append(("rollout.engine.sglang", recipe.rollout.engine.sglang, "remove it from the recipe"))
    return [
        UserFault(place, f"{what}, and the run saves its recipe", mend)
        for where, arguments, mend in free
        for place, what in secrets_in(arguments, where)
    ]
