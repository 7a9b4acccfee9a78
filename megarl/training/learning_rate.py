"""The learning rate of a step. Pure."""

from __future__ import annotations

import math
from typing import Protocol

from megarl.types import LrSchedule


class Schedule(Protocol):
    """Of the recipe's branches that learn."""

    @property
    def lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def lr_schedule(self) -> LrSchedule: ...
    @property
    def lr_end(self) -> float: ...


def learning_rate(schedule: Schedule, step: int, last_step: int) -> float:
    """Linear warm-up over the first steps, counted from 1; from there towards lr_end x lr, behind the last one."""
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps - 1) / max(1, last_step - schedule.warmup_steps))
    if schedule.lr_schedule == "constant":
        return schedule.lr
    left = 1.0 - done if schedule.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return schedule.lr * (schedule.lr_end + (1.0 - schedule.lr_end) * left)
