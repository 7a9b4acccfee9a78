"""SGLang engines event by event: admission, decoding and retraction in attention groups that step together. Pure.

The rules are those of SGLang 0.5.21, with pages of one token: PrefillAdder (schedule_policy.py), retract_decode
(schedule_batch.py) and NewTokenRatioTracker. Each sequence holds its whole prompt, though SGLang stores a prompt that
several share once; and it is read whole in the chunk in which its reading begins. An episode is one sequence, which
holds its observations from the beginning, and they are read there, too: as many seconds, in which nothing else runs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megarl.rollout.load_balancing import RequestBalancer

CLIPPED = 4096  # the most tokens of a response that are reserved (CLIP_MAX_NEW_TOKENS)
INITIAL_RATIO = 0.7  # share of them that is reserved for a running sequence; decays with each step
RATIO_IN_GROUPS = 0.3  # factor of that share with DP attention (parallel_hook.py)
# what the share decays to, over the initial one, and in how many steps
LEAST_OF_INITIAL = 0.14
DECAY_STEPS = 600
STEPS_AFTER_RETRACTION = 20  # further steps that a retraction makes room for

OfGroups = npt.NDArray[np.float64]  # [groups]


@dataclass(frozen=True)
class GroupLimits:
    """What each of an engine's attention groups can run: sequences, tokens in its cache, and the longest response.

    chunk: tokens of prompts that a group reads at once. conservativeness: SGLang's schedule_conservativeness. most_new:
    tokens that a request reserves at most; of an episode each turn is one.
    """

    groups: int
    slots: int
    cache: int
    longest: int
    chunk: int = 8192
    conservativeness: float = 1.0
    most_new: int = CLIPPED

    @property
    def initial_ratio(self) -> float:
        factor = RATIO_IN_GROUPS if self.groups > 1 else 1.0
        return min(INITIAL_RATIO * factor * self.conservativeness, 1.0)

    def reserved(self, age: float) -> float:
        """Tokens that a sequence counts as still to come."""
        return min(self.longest - age, self.most_new)


class Speed(Protocol):
    """How many seconds an engine takes."""

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        """Seconds of a step, a token of each sequence; running: sequences of each group; held: tokens in its cache."""
        ...

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        """Seconds to read so many tokens of one sequence: on its group's GPUs, and on all of the engine's."""
        ...


@dataclass(frozen=True)
class SimulatedRequest:
    """A sample to draw, whose length the simulation alone knows. shares_prompt: its group has read the prompt.

    response_tokens are sampled. observed_tokens, of an episode, are read in `turns` - 1 equal parts.
    """

    prompt_tokens: int
    response_tokens: int
    shares_prompt: bool = False
    observed_tokens: int = 0
    turns: int = 1

    @property
    def added_tokens(self) -> int:
        """All after the prompt."""
        return self.response_tokens + self.observed_tokens


@dataclass
class _Sequence:
    """origin: the engine's step at which it would have begun, had it never waited.

    age: tokens of its response while it waits, of which there are some after a retraction.
    """

    request: SimulatedRequest
    age: float = 0.0
    origin: float = 0.0
    number: int = 0  # of its admission; 0: it waits

    @property
    def tokens(self) -> float:
        """Tokens that it holds at its admission, which are read then if its group has not read its prompt."""
        return self.request.prompt_tokens + self.request.observed_tokens + self.age

    @property
    def base(self) -> float:
        """The tokens that it holds at any step, less the number of the step."""
        return self.request.prompt_tokens + self.request.observed_tokens - self.origin

    def read_s(self, speed: Speed) -> Iterator[tuple[float, float]]:
        """Seconds of each that is read at its admission, as of `Speed.prefill_s`.

        Observations count as if each were read after half of the sequence.
        """
        request = self.request
        if self.age:
            yield speed.prefill_s(int(self.tokens))
            return
        if not request.shares_prompt:
            yield speed.prefill_s(request.prompt_tokens)
        if request.observed_tokens:
            before = request.prompt_tokens + request.added_tokens // 2
            times = request.turns - 1
            of_group, of_all = speed.prefill_s(before + math.ceil(request.observed_tokens / times))
            before_group, before_all = speed.prefill_s(before)
            yield times * (of_group - before_group), times * (of_all - before_all)


@dataclass
class _Group:
    """Sequences of an attention group. ratio: new_token_ratio at the step `ratio_at`. is_full: SGLang's batch_is_full.

    not_before: the step before which nothing is admitted, because a retraction is followed by a step.
    """

    ratio: float
    ratio_at: float = 0.0
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: dict[int, _Sequence] = field(default_factory=dict)  # by number
    is_full: bool = False
    not_before: float = 0.0

    def is_ready(self, step: float) -> bool:
        """Whether it may admit something now."""
        return step >= self.not_before or not self.running


class SimulatedEngine:
    """One engine. `simulate` calls `next_event`, `advance`, `finish` and `admit`; `submit` queues a request.

    prefill_s: seconds in which no sequence got a token. most_running: sequences at once. retracted: how often a
    sequence lost its cache. tokens_again: tokens that were read again for that. tokens: of each group's finished
    sequences, prompts and responses.
    """

    def __init__(self, limits: GroupLimits, speed: Speed) -> None:
        self.limits = limits
        self._speed = speed
        self.clock = self.step = 0.0
        self.prefill_s = 0.0
        self.most_running = 0
        self.retracted = 0
        self.tokens_again = 0.0
        self.tokens = [0] * limits.groups
        self._groups = [_Group(limits.initial_ratio) for _ in range(limits.groups)]
        self._num_running = np.zeros(limits.groups)
        self._base = np.zeros(limits.groups)  # held tokens are base + running x step
        # the step that has no room for another token of each
        self._full_at = np.full(limits.groups, math.inf)
        # heap: step, number, group; with retracted ones
        self._ends: list[tuple[float, int, int, _Sequence]] = []
        self._to_admit: set[int] = set()
        self._admissions = 0
        self._stall_s = self._step_s = 0.0
        self._next = 0.0, math.inf  # step and clock of the next event

    @property
    def held(self) -> OfGroups:
        """Tokens in each group's cache."""
        return self._base + self._num_running * self.step

    def submit(self, request: SimulatedRequest, group: int) -> None:
        self._groups[group].waiting.append(_Sequence(request))
        self._to_admit.add(group)

    def next_event(self) -> float:
        """The clock when the next sequence finishes or the next group is full; infinite while nothing runs."""
        while self._ends and self._ends[0][1] != self._ends[0][3].number:
            heapq.heappop(self._ends)
        if not self._ends:
            self._next = self.step, math.inf
            return math.inf
        step = min(self._ends[0][0], float(self._full_at.min()))
        step = max(self.step, min(step, self.step + 1) if self._to_admit else step)
        middle = self.held + self._num_running * ((step - self.step) / 2)
        self._step_s = self._speed.step_s(self._num_running, middle)
        clock = self.clock + self._stall_s + (step - self.step) * self._step_s
        self._next = step, clock
        return clock

    def advance(self, now: float) -> None:
        """Let time pass in which nothing changes but ages."""
        spent = now - self.clock
        (step, clock) = self._next
        stalled = min(spent, self._stall_s)
        self._stall_s -= stalled
        self.prefill_s += stalled
        if now >= clock:
            self.step = step
        elif self._ends:
            self.step = min(step, self.step + (spent - stalled) / self._step_s)
        self.clock = now

    def finish(self) -> list[tuple[int, SimulatedRequest]]:
        """Take what has finished, with its group; then retract in groups whose cache is full."""
        finished: list[tuple[int, SimulatedRequest]] = []
        while self._ends and self._ends[0][0] <= self.step + 1e-6:
            _, number, index, sequence = heapq.heappop(self._ends)
            if number == sequence.number:
                self._remove(index, sequence)
                request = sequence.request
                self.tokens[index] += request.prompt_tokens + request.added_tokens
                finished.append((index, request))
        for index in np.flatnonzero(self._full_at <= self.step):
            self._retract(int(index))
        return finished

    def admit(self) -> None:
        """Start what may start. All groups wait for the one that reads most, and share the work of the experts."""
        longest_s = 0.0
        ready = [
            index for index in sorted(self._to_admit) if self._groups[index].is_ready(self.step)
        ]
        self._to_admit.difference_update(ready)
        for index in ready:
            group_s = 0.0
            for of_group, of_all in self._admit(index):
                group_s += of_group
                self._stall_s += of_all
            longest_s = max(longest_s, group_s)
        self._stall_s += longest_s
        self.most_running = max(self.most_running, int(self._num_running.sum()))

    def _admit(self, index: int) -> Iterator[tuple[float, float]]:
        """Chunks of prompts until no more may start; the seconds of what is read."""
        group = self._groups[index]
        while group.waiting and not group.is_full:
            was_empty = not group.running
            yield from self._admit_chunk(index)
            # SGLang keeps no such mark of an empty batch
            group.is_full = group.is_full and not was_empty

    def _admit_chunk(self, index: int) -> Iterator[tuple[float, float]]:
        """What of a group's queue starts together: new ones reserve all that they may, running ones their ratio."""
        limits = self.limits
        group = self._groups[index]
        longest_left = limits.longest - self.step
        reserved = sum(
            min(longest_left + sequence.origin, limits.most_new)
            for sequence in group.running.values()
        )
        room = limits.cache - self.held[index] - self._ratio(group) * reserved
        chunk = limits.chunk
        while group.waiting and chunk > 0:
            sequence = group.waiting[0]
            tokens = sequence.tokens
            needed = tokens + limits.reserved(sequence.age) + 1
            if group.running and (len(group.running) >= limits.slots or needed >= room):
                group.is_full = True
                break
            room -= tokens + limits.reserved(0) + 1
            if sequence.age:
                chunk -= int(tokens)
                self.tokens_again += tokens
            else:
                chunk -= sequence.request.prompt_tokens
            yield from sequence.read_s(self._speed)
            self._start(index, group.waiting.popleft())

    def _ratio(self, group: _Group) -> float:
        initial = self.limits.initial_ratio
        least = LEAST_OF_INITIAL * initial
        return max(
            least, group.ratio - (initial - least) / DECAY_STEPS * (self.step - group.ratio_at)
        )

    def _start(self, index: int, sequence: _Sequence) -> None:
        self._admissions += 1
        sequence.origin = self.step - sequence.age
        sequence.number = self._admissions
        self._groups[index].running[sequence.number] = sequence
        end = sequence.origin + sequence.request.response_tokens
        heapq.heappush(self._ends, (end, sequence.number, index, sequence))
        self._count(index, 1, sequence.base)

    def _remove(self, index: int, sequence: _Sequence) -> None:
        """Take a running sequence out: there may be room for others."""
        group = self._groups[index]
        del group.running[sequence.number]
        sequence.number = 0
        group.is_full = False
        self._count(index, -1, -sequence.base)
        self._to_admit.add(index)

    def _count(self, index: int, sequences: int, base: float) -> None:
        self._num_running[index] += sequences
        self._base[index] += base
        running = self._num_running[index]
        free = self.limits.cache - self._base[index]
        # a single one is taken to fit
        self._full_at[index] = math.floor(free / running) if running > 1 else math.inf

    def _retract(self, index: int) -> None:
        """Put the sequences with the fewest tokens back, at least one, until each of the others has room for one."""
        group = self._groups[index]
        while len(group.running) > 1 and self._full_at[index] <= self.step:
            sequence = max(
                group.running.values(), key=lambda running: (running.origin, running.number)
            )
            sequence.age = self.step - sequence.origin
            self._remove(index, sequence)
            group.waiting.append(sequence)
            self.retracted += 1
        ages = sum(self.step - sequence.origin for sequence in group.running.values())
        running = len(group.running)
        expected = (ages + STEPS_AFTER_RETRACTION * running) / (running * self.limits.longest + 1)
        group.ratio = min(1.0, expected)
        group.ratio_at = self.step
        group.not_before = self.step + 1


def simulate(
    engines: Sequence[SimulatedEngine], finished: Callable[[int, int, SimulatedRequest], None]
) -> list[float]:
    """Run until all submitted requests are done; the seconds at which each was.

    finished: called with engine, group and request of each; what it submits then starts at once.
    """
    ends: list[float] = []
    for engine in engines:
        engine.admit()
    while (now := min(engine.next_event() for engine in engines)) < math.inf:
        for engine in engines:
            engine.advance(now)
        for number, engine in enumerate(engines):
            for group, request in engine.finish():
                ends.append(now)
                finished(number, group, request)
        for engine in engines:
            engine.admit()
    return ends


def observe_lengths(balancer: RequestBalancer, lengths: Sequence[int]) -> None:
    """Let a balancer see responses of these lengths finish, as those of the round before."""
    receiver = balancer.assign(0, len(lengths)) or 0  # the first, which has nothing yet
    for length in lengths:
        balancer.finish(receiver, 0, length)
