"""Simulated engines for dealing.py and overlap.py: the plan's engine with seconds of its own, and a rollout's bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.plan.engine_simulation import (
    GroupLimits,
    OfGroups,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)


@dataclass(frozen=True)
class Machine:
    """Engines of attention groups. slots, cache: sequences and tokens that a group can hold.

    A step takes step_of_none_s, and a little more for each sequence and cached token of the fullest group. The defaults
    are about DeepSeek-V3's on 32 GPUs in 32 groups in fp8, by megarl's plan: 24 ms for a sequence, 42 ms for 48 each.
    """

    engines: int
    groups: int
    slots: int
    cache: int
    longest: int
    step_of_none_s: float = 22e-3
    sequence_s: float = 0.2e-3
    token_s: float = 5e-8
    prompt_token_s: float = 1e-5  # to read a prompt's token, in the whole engine

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        """As `Speed` of the simulation."""
        return self.step_of_none_s + float(np.max(self.sequence_s * running + self.token_s * held))

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        """As `Speed` of the simulation."""
        return 0.0, tokens * self.prompt_token_s

    def start(self) -> list[SimulatedEngine]:
        limits = GroupLimits(self.groups, self.slots, self.cache, self.longest)
        return [SimulatedEngine(limits, self) for _ in range(self.engines)]


@dataclass(frozen=True)
class Outcome:
    """Seconds of all samples, and from 90 % of them on; the busiest group's tokens over the mean; retractions.

    ends: the seconds at which each sample was done, by time.
    """

    total_s: float
    tail_s: float
    imbalance: float
    retracted: int
    ends: tuple[tuple[float, SimulatedRequest], ...]


def outcome(
    engines: Sequence[SimulatedEngine], finished: Callable[[int, int, SimulatedRequest], None]
) -> Outcome:
    """Run until all submitted samples are done; finished: of each, with engine and group."""
    done: list[SimulatedRequest] = []

    def noted(engine: int, group: int, sample: SimulatedRequest) -> None:
        done.append(sample)
        finished(engine, group, sample)

    ends = simulate(engines, noted)
    tokens = [of_group for engine in engines for of_group in engine.tokens]
    tail = ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1]
    retracted = sum(engine.retracted for engine in engines)
    imbalance = max(tokens) / (sum(tokens) / len(tokens))
    return Outcome(ends[-1], tail, imbalance, retracted, tuple(zip(ends, done, strict=True)))


def least_s(samples: Sequence[SimulatedRequest], machine: Machine) -> float:
    """Seconds below which no dealing comes, whatever it knows.

    The longest sample alone in its engine; and all engines, groups and slots evenly full until the end, in as many
    steps as slots and cache allow.
    """
    longest = max(samples, key=lambda sample: sample.response_tokens)
    groups = machine.engines * machine.groups
    tokens = sum(sample.response_tokens for sample in samples)
    held = sum(_held(sample) for sample in samples)
    steps = max(tokens / machine.slots, held / machine.cache) / groups
    prefill = (
        sum(sample.prompt_tokens for sample in samples) * machine.prompt_token_s / machine.engines
    )
    full = (
        machine.step_of_none_s * steps
        + (machine.sequence_s * tokens + machine.token_s * held) / groups
        + prefill
    )
    alone = (
        machine.step_of_none_s + machine.sequence_s
    ) * longest.response_tokens + machine.token_s * _held(longest)
    return max(full, alone)


def _held(sample: SimulatedRequest) -> float:
    """The tokens that it holds, summed over its steps."""
    return sample.response_tokens * (sample.prompt_tokens + sample.response_tokens / 2)
