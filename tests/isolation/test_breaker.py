"""A circuit breaker, at chosen times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.isolation.breaker import Admission, Breaker, BreakerOpen

PATIENCE_S = 60.0


def breaker() -> Breaker:
    """One whose probes come as late as they may: after 1, 2, 4... s."""
    return Breaker(draw=lambda: 1.0)


def fail(tested: Breaker, now: float, reason: str = "no") -> None:
    """A try that goes, and has no answer."""
    admission = tested.admit(now, PATIENCE_S)
    assert not admission.wait_s
    tested.failed(admission, now, reason)


def opened(tested: Breaker) -> Breaker:
    """Open since 10.0, the first of its failures at 9.0; the next probe is due at 11.0."""
    for now in (9.0, 9.5, 10.0):
        fail(tested, now)
    assert tested.is_open
    return tested


@pytest.mark.parametrize(
    ("times", "is_open"),
    [
        ((0.0, 0.5, 1.0), True),
        ((0.0, 5.0), False),
        # a hundred that were asked together say no more than one
        ((3.0,) * 100, False),
        ((3.0,) * 100 + (4.0,), True),
    ],
)
def test_it_opens_after_several_failures_in_a_second(
    times: tuple[float, ...], is_open: bool
) -> None:
    tested = breaker()
    for now in times:
        tested.failed(Admission(), now, "no")
    assert tested.is_open == is_open


def test_an_answer_in_between_keeps_it_closed() -> None:
    """A busy service refuses most tries, and is not down."""
    tested = breaker()
    for number in range(100):
        fail(tested, number / 2)
        if number % 3 == 1:
            tested.answered()
    assert not tested.is_open


def test_one_probe_at_a_time_goes_and_closes_it() -> None:
    tested = opened(breaker())
    assert tested.admit(10.0, PATIENCE_S).wait_s == 1.0
    assert tested.admit(10.75, PATIENCE_S).wait_s == 0.25
    probe = tested.admit(11.0, PATIENCE_S)
    assert probe.is_probe and not probe.wait_s
    assert tested.admit(11.0, PATIENCE_S).wait_s > 0
    tested.answered()
    assert not tested.is_open
    assert tested.admit(11.1, PATIENCE_S).wait_s == 0


def test_probes_that_fail_become_rarer() -> None:
    tested = opened(breaker())
    now = 10.0
    waits = []
    for _ in range(7):
        waits.append(tested.admit(now, 1e6).wait_s)
        now += waits[-1]
        fail(tested, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    tested.answered()
    assert opened(tested).admit(10.0, PATIENCE_S).wait_s == 1.0, "the next outage begins anew"


def test_calls_are_given_up_when_it_has_been_open_for_as_long_as_they_wait() -> None:
    """But not while a probe is in flight, which may have an answer."""
    tested = opened(breaker())
    assert tested.admit(10.5, 1.8).wait_s == pytest.approx(0.3), "it asks again to be given up"
    with pytest.raises(BreakerOpen, match=r"has not answered for 2 s \(no\)"):
        tested.admit(10.9, 1.8)
    probe = tested.admit(11.0, 1.8)
    assert tested.admit(90.0, 1.8).wait_s > 0
    tested.failed(probe, 90.0, "still no")
    with pytest.raises(BreakerOpen, match=r"has not answered for 81 s \(still no\)"):
        tested.admit(90.1, 1.8)


def test_a_probe_that_is_given_up_makes_room_for_another() -> None:
    tested = opened(breaker())
    tested.dropped(tested.admit(11.0, PATIENCE_S))
    assert tested.admit(11.0, PATIENCE_S).is_probe


def test_tries_from_before_it_opened_do_not_count_as_probes() -> None:
    tested = breaker()
    early = tested.admit(0.0, PATIENCE_S)
    opened(tested)
    tested.failed(early, 10.5, "late")
    probe = tested.admit(11.0, PATIENCE_S)
    assert probe.is_probe, "it is due when it was"
    for now in (11.1, 11.2):
        tested.failed(early, now, "late")
        tested.dropped(early)
    assert tested.admit(11.3, PATIENCE_S).wait_s > 0, "the probe is still in flight"
    tested.answered()  # of an early one
    tested.failed(probe, 12.0, "no")
    assert not tested.is_open


def test_a_service_is_left_alone_for_as_long_as_it_wishes() -> None:
    tested = breaker()
    for now in (0.0, 1.0):
        fail(tested, now)
    tested.failed(tested.admit(2.0, PATIENCE_S), 2.0, "busy", after_s=20.0)
    assert tested.admit(2.0, PATIENCE_S).wait_s == 20.0
    fail(tested, 22.0)
    assert tested.admit(22.0, PATIENCE_S).wait_s == 2.0


@given(st.lists(st.tuples(st.sampled_from("afd"), st.floats(0, 40)), max_size=60))
def test_whatever_happens_somebody_goes_within_half_a_minute(
    steps: list[tuple[str, float]],
) -> None:
    """No order of answers, failures and dropped tries leaves a breaker that lets nobody through."""
    tested = breaker()
    now = 0.0
    for outcome, wait_s in steps:
        now += wait_s
        try:
            admission = tested.admit(now, PATIENCE_S)
        except BreakerOpen:
            continue
        if admission.wait_s:
            continue
        if outcome == "a":
            tested.answered()
        elif outcome == "f":
            tested.failed(admission, now, "no")
        else:
            tested.dropped(admission)
    assert tested.admit(now + 31.0, PATIENCE_S).wait_s == 0
