"""An engine's events against a simulation token by token, and what holds of every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.plan.engine_simulation import (
    GroupLimits,
    OfGroups,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)

LONGEST, LONGEST_PROMPT = 30, 10
ROOMY = 10**9
requests = st.lists(
    st.builds(SimulatedRequest, st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST)), min_size=1, max_size=25
)  # fmt: skip
limits = st.builds(
    GroupLimits,
    groups=st.integers(1, 3),
    slots=st.integers(1, 8),
    cache=st.integers(80, 200),
    longest=st.just(LONGEST),
    chunk=st.integers(1, 40),
    conservativeness=st.sampled_from([0.0, 0.1, 1.0]),
)


class Linear:
    """A step takes a second, and a little more by the sequences and the tokens of all groups."""

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        return 1.0 + 0.1 * float(running.sum()) + 0.01 * float(held.sum())

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        return 0.3 * tokens, 0.05 * tokens


class Steps:
    """Every step takes a second, and prompts take none."""

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        return 1.0

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        return 0.0, 0.0


class Watched(SimulatedEngine):
    """No group ever holds more than its cache, nor runs more than its slots."""

    def advance(self, now: float) -> None:
        super().advance(now)
        assert (self.held <= self.limits.cache).all()
        assert self.most_running <= self.limits.groups * self.limits.slots


def run(
    limits: GroupLimits, asked: Sequence[SimulatedRequest], speed: Linear | Steps
) -> tuple[list[float], SimulatedEngine]:
    """The seconds of each end; requests go to the groups in turn, all at the start."""
    engine = Watched(limits, speed)
    for place, request in enumerate(asked):
        engine.submit(request, place % limits.groups)
    return simulate([engine], lambda *_: None), engine


@dataclass
class Row:
    """A sequence of the simulation token by token."""

    request: SimulatedRequest
    age: int = 0
    order: int = 0  # of its last admission

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.age


@dataclass
class Queue:
    """A group of the simulation token by token."""

    waiting: list[Row]
    ratio: tuple[float, int]
    running: list[Row] = field(default_factory=list)
    is_full: bool = False


class ByTheToken:
    """The same rules without a clock that jumps: everything is looked at before each step."""

    def __init__(self, limits: GroupLimits, asked: Sequence[SimulatedRequest]) -> None:
        self.limits, self.step, self.seconds, self.prefill_s = limits, 0, 0.0, 0.0
        self.ends: list[float] = []
        self.retracted = self.again = self.admissions = 0
        self.queues = [
            Queue(
                [Row(request) for request in asked[index :: limits.groups]],
                (limits.initial_ratio, 0),
            )
            for index in range(limits.groups)
        ]

    def run(self) -> ByTheToken:
        while any(queue.waiting or queue.running for queue in self.queues):
            fresh = [queue for queue in self.queues if not self.retract(queue)]
            longest_s = 0.0
            for queue in fresh:
                read = self.admit(queue)
                longest_s = max(longest_s, 0.3 * read)
                self.prefill_s += 0.05 * read
            self.prefill_s += longest_s
            for queue in fresh:
                self.retract(queue)
            self.decode()
        return self

    def has_room(self, queue: Queue) -> bool:
        """For another token of each sequence."""
        return (
            len(queue.running) < 2
            or sum(row.tokens + 1 for row in queue.running) <= self.limits.cache
        )

    def retract(self, queue: Queue) -> bool:
        if self.has_room(queue):
            return False
        while not self.has_room(queue):
            row = min(queue.running, key=lambda row: (row.age, -row.order))
            queue.running.remove(row)
            queue.waiting.append(row)
            self.retracted += 1
        queue.is_full = False
        count = len(queue.running)
        expected = (sum(row.age for row in queue.running) + 20 * count) / (
            count * self.limits.longest + 1
        )
        queue.ratio = min(1.0, expected), self.step
        return True

    def admit(self, queue: Queue) -> int:
        read = 0
        while queue.waiting and not queue.is_full:
            was_empty, limits, (ratio, at) = not queue.running, self.limits, queue.ratio
            least = 0.14 * limits.initial_ratio
            ratio = max(least, ratio - (limits.initial_ratio - least) / 600 * (self.step - at))
            left = sum(min(limits.longest - row.age, 4096) for row in queue.running)
            room = limits.cache - sum(row.tokens for row in queue.running) - ratio * left
            chunk = limits.chunk
            while queue.waiting and chunk > 0:
                row = queue.waiting[0]
                needed = row.tokens + min(limits.longest - row.age, 4096) + 1
                if queue.running and (len(queue.running) >= limits.slots or needed >= room):
                    queue.is_full = not was_empty
                    break
                room -= row.tokens + min(limits.longest, 4096) + 1
                chunk -= row.tokens
                read += row.tokens
                self.again += row.tokens if row.age else 0
                self.admissions += 1
                row.order = self.admissions
                queue.running.append(queue.waiting.pop(0))
        return read

    def decode(self) -> None:
        rows = [row for queue in self.queues for row in queue.running]
        self.step += 1
        self.seconds += 1.0 + 0.1 * len(rows) + 0.01 * sum(row.tokens + 0.5 for row in rows)
        for queue in self.queues:
            for row in list(queue.running):
                row.age += 1
                if row.age == row.request.response_tokens:
                    queue.running.remove(row)
                    queue.is_full = False
                    self.ends.append(self.seconds + self.prefill_s)


@given(limits, requests)
def test_events_are_those_of_a_simulation_token_by_token(
    limits: GroupLimits, asked: list[SimulatedRequest]
) -> None:
    expected = ByTheToken(limits, asked).run()
    ends, engine = run(limits, asked, Linear())
    assert ends == pytest.approx(expected.ends)
    assert engine.prefill_s == pytest.approx(expected.prefill_s)
    assert (engine.retracted, engine.tokens_again) == (expected.retracted, expected.again)


@given(limits, requests)
def test_all_samples_finish_and_each_token_is_counted_once(
    limits: GroupLimits, asked: list[SimulatedRequest]
) -> None:
    ends, engine = run(limits, asked, Linear())
    assert len(ends) == len(asked) and ends == sorted(ends)
    assert sum(engine.tokens) == sum(
        request.prompt_tokens + request.response_tokens for request in asked
    )
    assert not engine.held.any()


def test_groups_admit_more_than_one_group_and_retract_it() -> None:
    """With DP attention 0.3 of the reserve is kept free."""
    asked = [SimulatedRequest(100, 4000)] * 64
    of_one, of_groups = (
        run(GroupLimits(groups, 64, 40_000, 8192), asked * groups, Steps())[1] for groups in (1, 2)
    )
    assert of_groups.retracted / 2 > of_one.retracted
    cautious = GroupLimits(2, 64, 40_000, 8192, conservativeness=4.0)
    assert run(cautious, asked * 2, Steps())[1].retracted < of_groups.retracted


def test_samples_that_share_their_prompt_read_it_once_and_anew_when_they_were_retracted() -> None:
    asked = [SimulatedRequest(10, 20, shares_prompt=place > 0) for place in range(4)]
    _, engine = run(GroupLimits(1, 4, 85, LONGEST, conservativeness=0.0), asked, Linear())
    # of three, which then have 84 tokens
    assert (engine.retracted, engine.tokens_again) == (1, 10 + 18)
    assert engine.prefill_s == pytest.approx(0.35 * (10 + 28))
