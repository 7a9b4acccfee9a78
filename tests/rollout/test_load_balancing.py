"""The dealer of requests: everything is dealt once, no receiver idles while work waits, equal loads take turns."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.load_balancing import Capacity, RequestBalancer

LONGEST = 400
WIDE = Capacity(10**6, 10**9)
requests = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(1, LONGEST)), max_size=40
)
capacities = st.lists(
    st.builds(Capacity, st.integers(1, 12), st.integers(1, 3000)), min_size=1, max_size=5
)


@given(requests, capacities, st.randoms(use_true_random=False))
def test_everything_is_dealt_once_within_the_rooms(asked, capacities, random) -> None:
    """In the order in which it was asked; samples finish in any order."""
    balancer, waiting = RequestBalancer(capacities, LONGEST), deque(asked)
    running: list[tuple[int, int, int]] = []
    assigned: Counter[int] = Counter()
    while waiting or running:
        while waiting:
            held = Counter(receiver for receiver, _, _ in running)
            prompt, samples, response = waiting[0]
            receiver = balancer.assign(prompt, samples)
            if receiver is None:
                assert all(held[index] for index in range(len(capacities))), (
                    "a receiver idles while work waits"
                )
                break
            assert held[receiver] < capacities[receiver].sequences
            assert not held[receiver] or balancer.expected_tokens(receiver) > 0
            waiting.popleft()
            running += [(receiver, prompt, response)] * samples
            assigned[receiver] += samples
        balancer.finish(*running.pop(random.randrange(len(running))))
    assert assigned.total() == sum(samples for _, samples, _ in asked)
    assert [balancer.expected_tokens(index) for index in range(len(capacities))] == [0] * len(
        capacities
    )


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_equal_requests_go_round(receivers: int, samples: int, count: int) -> None:
    balancer = RequestBalancer([WIDE] * receivers, LONGEST)
    assert [balancer.assign(7, samples) for _ in range(count)] == [
        number % receivers for number in range(count)
    ]


def test_the_one_with_the_least_left_gets_the_next() -> None:
    """Two of three samples of receiver 1 finish: it has less left than the others."""
    balancer = RequestBalancer([WIDE] * 3, LONGEST)
    assert [balancer.assign(10, 3) for _ in range(3)] == [0, 1, 2]
    balancer.finish(1, 10, 50)
    balancer.finish(1, 10, 60)
    assert [balancer.assign(10, 1) for _ in range(3)] == [1, 1, 2]


def test_long_prompts_count() -> None:
    balancer = RequestBalancer([WIDE] * 2, LONGEST)
    assert [balancer.assign(tokens) for tokens in (1000, 10, 10, 10)] == [0, 1, 1, 1]


def test_the_mean_begins_with_the_round_before() -> None:
    """The guess is a quarter of the longest response, and weighs one; a small round weighs as many as it had."""
    balancer = RequestBalancer([WIDE], LONGEST)
    assert balancer.mean_response == 100
    balancer.assign(10, 3)
    for length in (200, 300, 300):
        balancer.finish(0, 10, length)
    assert balancer.mean_response == pytest.approx(900 / 4)
    balancer.assign(10, 2)
    balancer.finish(0, 10, 10)
    mean = (200 + 300 + 300 + 10) / 4
    assert balancer.mean_response == pytest.approx(mean), "of the round before, and of this one"
    balancer.withdraw(0, 10)
    assert balancer.mean_response == pytest.approx(mean), "an aborted one says nothing"
    assert balancer.expected_tokens(0) == 0


def test_a_large_round_before_does_not_outweigh_this_one() -> None:
    """An evaluation of long responses before a step of training."""
    balancer = RequestBalancer([WIDE], LONGEST)
    for length, count in ((4000, 10_000), (40, 2000)):
        balancer.assign(10, count)
        for _ in range(count):
            balancer.finish(0, 10, length)
    assert balancer.mean_response < (4000 + 40) / 2


def test_sequences_that_start_together_may_be_more_than_fit_when_they_are_long() -> None:
    """Each counts 10 + 90 tokens: 20 of them at the start, then the next when fewer than 12.5 are left."""
    balancer = RequestBalancer([Capacity(10**6, 1000)], 360)
    for _ in range(20):
        assert balancer.assign(10) == 0
    assert balancer.assign(10) is None
    for _ in range(7):
        balancer.finish(0, 10, 90)
        assert balancer.assign(10) is None
    balancer.finish(0, 10, 90)
    assert balancer.assign(10) == 0
    assert balancer.assign(10) is None
