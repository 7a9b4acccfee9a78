"""How many sequences an engine is asked for at once."""

from __future__ import annotations

import math

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe


def step_sequences(recipe: Recipe) -> int:
    """The most sequences that an engine gets in one round of a training step: prompts go to the engines in turn."""
    name, rollout = recipe.algorithm.name, recipe.rollout
    num_prompts = hyperparameters_of(name, recipe.algorithm).num_drawn(rollout.prompts_per_step)
    of_prompt = rollout.samples_per_prompt + ALGORITHMS[name].greedy_baseline
    return math.ceil(num_prompts / rollout.engine.count) * of_prompt


def most_sequences(recipe: Recipe) -> int:
    """The most sequences that an engine gets in a round or an evaluation, as a multiple of its attention DP groups."""
    sets, engine = [recipe.evaluation.of(name) for name in recipe.data.eval], recipe.rollout.engine
    of_sets = [math.ceil(evaluation.max_prompts / engine.count) * evaluation.samples for evaluation in sets]
    most = max(step_sequences(recipe), *of_sets) if of_sets else step_sequences(recipe)
    return math.ceil(most / engine.dp) * engine.dp
