"""How many sequences one engine is asked for at once."""

from __future__ import annotations

import math

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe


def step_sequences(recipe: Recipe) -> int:
    """The most that one engine gets of a training step's round: the prompts are dealt out whole, in turn."""
    name, rollout = recipe.algorithm.name, recipe.rollout
    num_prompts = hyperparameters_of(name, recipe.algorithm).num_drawn(rollout.prompts_per_step)
    of_prompt = rollout.samples_per_prompt + ALGORITHMS[name].greedy_baseline
    return math.ceil(num_prompts / rollout.engine.count) * of_prompt


def most_sequences(recipe: Recipe) -> int:
    """The most that one engine gets of a step's round or of an evaluation set; a multiple of its attention groups."""
    sets, engine = [recipe.evaluation.of(name) for name in recipe.data.eval], recipe.rollout.engine
    of_sets = [math.ceil(own.max_prompts / engine.count) * own.samples for own in sets]
    most = max(step_sequences(recipe), *of_sets) if of_sets else step_sequences(recipe)
    return math.ceil(most / engine.dp) * engine.dp
