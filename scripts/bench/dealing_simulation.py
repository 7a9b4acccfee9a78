"""Simulated engines for scripts/bench/dealing.py: continuous batching in attention groups, with retraction."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CLIPPED, RESERVED = 4096, 0.7  # tokens of a running sequence that SGLang reserves for: at most, and which share
RESERVED_IN_GROUPS = 0.3  # of that share with DP attention (SGLang's parallel_hook.py)


@dataclass(frozen=True)
class Sample:
    """A sample to draw; its response is known to the simulation alone. prompt: its number."""

    prompt: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Machine:
    """Engines of attention groups. slots, cache: sequences and tokens that a group can hold.

    A step takes step_s, and for each sequence and each cached token of the fullest group a little more. The defaults
    are about DeepSeek-V3's on 32 GPUs in 32 groups in fp8, by megarl's plan: 24 ms for a sequence, 42 ms for 48 each.
    """

    engines: int
    groups: int
    slots: int
    cache: int
    longest: int
    step_s: float = 22e-3
    sequence_s: float = 0.2e-3
    token_s: float = 5e-8
    prefill_s: float = 1e-5  # of a prompt's token, in the whole engine

    @property
    def reserved_share(self) -> float:
        return RESERVED * (RESERVED_IN_GROUPS if self.groups > 1 else 1.0)


@dataclass
class _Group:
    """The sequences of a group, whose ages are counted in the engine's steps."""

    waiting: deque[tuple[Sample, int]] = field(default_factory=deque)  # with the tokens that it had when retracted
    running: list[tuple[float, int, Sample, float]] = field(default_factory=list)  # heap: end, number, sample, origin
    base: float = 0.0  # held tokens are base + running x step
    retracted: int = 0

    def held(self, step: float) -> float:
        return self.base + len(self.running) * step


class SimulatedEngine:
    """A simulated engine. `simulate` calls `next_event`, `advance`, `finish`, `admit`; `submit` queues a sample."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.groups = [_Group() for _ in range(machine.groups)]
        self.clock = self.step = 0.0
        self.tokens = [0] * machine.groups
        self._stall_s = self._mean_step_s = 0.0
        self._numbers = 0

    def submit(self, sample: Sample, group: int) -> None:
        self.groups[group].waiting.append((sample, 0))

    def admit(self) -> None:
        """Start what may start by SGLang's rule: a share of what the running sequences may still need stays free."""
        for group in self.groups:
            while group.waiting and self._admits(group, *group.waiting[0]):
                sample, age = group.waiting.popleft()
                origin = self.step - age
                self._numbers += 1
                heapq.heappush(group.running, (origin + sample.response_tokens, self._numbers, sample, origin))
                group.base += sample.prompt_tokens - origin
                self._stall_s += (sample.prompt_tokens + age) * self.machine.prefill_s

    def _admits(self, group: _Group, sample: Sample, age: int) -> bool:
        if not group.running:
            return True
        of_one = min(CLIPPED, self.machine.longest) * self.machine.reserved_share
        needed = group.held(self.step) + sample.prompt_tokens + age + of_one * (1 + len(group.running))
        return len(group.running) < self.machine.slots and needed <= self.machine.cache

    def next_event(self) -> float:
        """When the next sample finishes or the next group is full."""
        targets = [min(group.running[0][0], self._full(group)) for group in self.groups if group.running]
        if not targets:
            return math.inf
        steps = max(0.0, min(targets) - self.step)
        self._mean_step_s = self._step_s(self.step + steps / 2)
        return self.clock + self._stall_s + steps * self._mean_step_s

    def _full(self, group: _Group) -> float:
        if len(group.running) == 1:
            return math.inf
        return (self.machine.cache - group.base) / len(group.running)

    def _step_s(self, step: float) -> float:
        machine = self.machine
        return machine.step_s + max(
            machine.sequence_s * len(group.running) + machine.token_s * group.held(step) for group in self.groups
        )

    def advance(self, now: float) -> None:
        """Let time pass in which nothing changes but ages."""
        spent = now - self.clock
        stalled = min(spent, self._stall_s)
        self._stall_s -= stalled
        if any(group.running for group in self.groups):
            self.step += (spent - stalled) / self._mean_step_s
        self.clock = now

    def finish(self) -> list[tuple[int, Sample]]:
        """Take what has finished, (group, sample), and retract the youngest sequences of groups whose cache is full."""
        found = []
        for number, group in enumerate(self.groups):
            while group.running and group.running[0][0] <= self.step + 1e-6:
                _, _, sample, origin = heapq.heappop(group.running)
                group.base -= sample.prompt_tokens - origin
                self.tokens[number] += sample.prompt_tokens + sample.response_tokens
                found.append((number, sample))
            while len(group.running) > 1 and group.held(self.step) >= self.machine.cache - 1e-3:
                youngest = max(group.running, key=lambda one: one[3])
                group.running.remove(youngest)
                heapq.heapify(group.running)
                _, _, sample, origin = youngest
                group.base -= sample.prompt_tokens - origin
                group.retracted += 1
                group.waiting.appendleft((sample, int(self.step - origin)))
        return found


@dataclass(frozen=True)
class Outcome:
    """Seconds of all samples, and from 90 % of them on; the busiest group's tokens over the mean; retractions."""

    total_s: float
    tail_s: float
    imbalance: float
    retracted: int


# (engine, group, sample) of a sample that has finished; what it submits then starts at once
OnFinish = Callable[[int, int, Sample], None]


def simulate(engines: Sequence[SimulatedEngine], finished: OnFinish) -> Outcome:
    """Run until all submitted samples are done."""
    ends = []
    for engine in engines:
        engine.admit()
    while (now := min(engine.next_event() for engine in engines)) < math.inf:
        for engine in engines:
            engine.advance(now)
        for engine in engines:
            for group, sample in engine.finish():
                ends.append(now)
                finished(engine.number, group, sample)
        for engine in engines:
            engine.admit()
    tokens = [of_group for engine in engines for of_group in engine.tokens]
    retracted = sum(group.retracted for engine in engines for group in engine.groups)
    tail = ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1]
    return Outcome(ends[-1], tail, max(tokens) / (sum(tokens) / len(tokens)), retracted)


def least_s(samples: Sequence[Sample], machine: Machine) -> float:
    """Seconds below which no dealing comes, whatever it knows.

    The longest sample alone in its engine; and all engines, groups and slots evenly full until the end, in as many
    steps as slots and cache allow.
    """
    longest = max(samples, key=lambda one: one.response_tokens)
    groups = machine.engines * machine.groups
    tokens = sum(one.response_tokens for one in samples)
    held = sum(_held(one) for one in samples)
    steps = max(tokens / machine.slots, held / machine.cache) / groups
    prefill = sum(one.prompt_tokens for one in samples) * machine.prefill_s / machine.engines
    full = machine.step_s * steps + (machine.sequence_s * tokens + machine.token_s * held) / groups + prefill
    alone = (machine.step_s + machine.sequence_s) * longest.response_tokens + machine.token_s * _held(longest)
    return max(full, alone)


def _held(sample: Sample) -> float:
    """The tokens that it holds, summed over its steps."""
    return sample.response_tokens * (sample.prompt_tokens + sample.response_tokens / 2)
