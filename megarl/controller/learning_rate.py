"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from megarl.algos import hyperparameters_of
from megarl.config import Recipe, TrainConfig
from megarl.fleet.fleet import TrainingFleet


def learning_rate(train: TrainConfig, step: int, last_step: int) -> float:
    """Linear warm-up over the first steps, counted from 1; from there towards lr_end x lr, behind the last one."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup_steps - 1) / max(1, last_step - train.warmup_steps))
    left = 1.0 - done
    if train.lr_schedule == "cosine":
        left = (1.0 + math.cos(math.pi * done)) / 2
    return train.lr * (train.lr_end + (1.0 - train.lr_end) * left)


def policy_lr(recipe: Recipe, fleet: TrainingFleet) -> Callable[[int], float | None]:
    """The recipe's learning rate of the policy by step; None in the first steps, in which only the critic learns."""
    before = 0
    if fleet.critic:
        hyperparameters = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
        before = hyperparameters.critic_warmup_steps
    last = recipe.run.steps - before
    return lambda step: learning_rate(recipe.train, step - before, last) if step > before else None
