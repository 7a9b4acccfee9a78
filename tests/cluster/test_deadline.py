"""A silence is judged by those that have ended, between a floor and the ceiling."""

from __future__ import annotations

from megarl.cluster.deadline import ENOUGH_ALIKE, Deadline


def test_the_limit_is_the_ceiling_until_enough_silences_have_ended() -> None:
    deadline = Deadline(600.0)
    for _ in range(19):
        deadline.observe(0.5)
    assert deadline.limit_s == 600.0
    deadline.observe(0.5)
    assert deadline.limit_s == 8.0, "the floor: five times half a second is less"


def test_a_long_silence_raises_the_limit_up_to_the_ceiling() -> None:
    deadline = Deadline(600.0)
    for _ in range(20):
        deadline.observe(0.5)
    deadline.observe(4.0)
    assert deadline.limit_s == 20.0
    deadline.observe(200.0)
    assert deadline.limit_s == 600.0


def test_three_of_the_same_work_are_enough() -> None:
    deadline = Deadline(600.0, enough=ENOUGH_ALIKE)
    for _ in range(2):
        deadline.observe(2.0)
    assert deadline.limit_s == 600.0
    deadline.observe(2.0)
    assert deadline.limit_s == 10.0


def test_a_ceiling_below_the_floor_holds() -> None:
    deadline = Deadline(5.0)
    for _ in range(50):
        deadline.observe(0.1)
    assert deadline.limit_s == 5.0
