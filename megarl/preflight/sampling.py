"""Ways of sampling that an algorithm cannot learn from, or that make evaluations pointless."""

from __future__ import annotations

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.config import Recipe
from megarl.spelling import did_you_mean, near
from megarl.types import UserFault


def sampling_faults(recipe: Recipe) -> list[UserFault]:
    """Faults of how training samples are drawn, where the algorithm is known and learns from samples."""
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
        others = ", ".join(other for other, row in ALGORITHMS.items() if row.surrogate and not row.needs_group)
        problem = f"1, and {name} compares the samples of a prompt with each other"
        mend = f"set it to at least 2, or choose an algorithm.name that does not ({others})"
        faults.append(UserFault("rollout.samples_per_prompt", problem, mend))
    elif hyperparameters_of(name, recipe.algorithm).dynamic_sampling:
        problem = "true keeps prompts with right and wrong answers, and rollout.samples_per_prompt is 1"
        mend = "set it to false, or rollout.samples_per_prompt to at least 2"
        faults.append(UserFault("algorithm.dynamic_sampling", problem, mend))
    return faults


def eval_faults(recipe: Recipe) -> list[UserFault]:
    """Keys for evaluation sets that data.eval does not have, and several greedy answers, which are all the same."""
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
