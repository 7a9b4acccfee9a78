"""Ways of sampling that an algorithm cannot learn from."""

from __future__ import annotations

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.config import Recipe
from megarl.types import UserFault


def sampling_faults(recipe: Recipe) -> list[UserFault]:
    """All that is wrong with how the training samples are drawn, where the algorithm is known and learns from any."""
    name, rollout = recipe.algorithm.name, recipe.rollout
    if name not in ALGORITHMS or learns_from_answers(name):
        return []
    faults = []
    if rollout.top_p < 1:
        problem = f"{rollout.top_p} cuts off tokens that the policy's log-probabilities, ratios and entropy count"
        mend = "set it to 1.0, or shape the samples by rollout.temperature; evaluation.top_p may be below 1"
        faults.append(UserFault("rollout.top_p", problem, mend))
    if rollout.samples_per_prompt > 1:
        return faults
    if ALGORITHMS[name].needs_group:
        others = ", ".join(one for one, row in ALGORITHMS.items() if row.surrogate and not row.needs_group)
        problem = f"1, and {name} compares the samples of a prompt with each other"
        mend = f"set it to at least 2, or choose an algorithm.name that does not ({others})"
        faults.append(UserFault("rollout.samples_per_prompt", problem, mend))
    elif hyperparameters_of(name, recipe.algorithm).dynamic_sampling:
        problem = "true keeps prompts with right and wrong answers, and rollout.samples_per_prompt is 1"
        mend = "set it to false, or rollout.samples_per_prompt to at least 2"
        faults.append(UserFault("algorithm.dynamic_sampling", problem, mend))
    return faults
