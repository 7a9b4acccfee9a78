"""A slot may fail so often in a window of time."""

from __future__ import annotations

from megarl.recovery.restarts import Restarts


def test_each_slot_may_fail_so_often_in_a_window() -> None:
    now_s = 0.0
    restarts = Restarts(2, 100.0, lambda: now_s)
    assert [restarts.admit(0), restarts.admit(0), restarts.admit(0)] == [True, True, False]
    assert restarts.admit(1), "another slot has its own failures"
    now_s = 101.0
    assert [restarts.admit(0), restarts.admit(0), restarts.admit(0)] == [True, True, False]


def test_failures_that_are_older_than_the_window_are_forgotten_one_by_one() -> None:
    now_s = 0.0
    restarts = Restarts(1, 100.0, lambda: now_s)
    assert restarts.admit(0)
    now_s = 60.0
    assert not restarts.admit(0)
    now_s = 150.0
    assert not restarts.admit(0), "that of 60 s is in the window"
    now_s = 260.0
    assert restarts.admit(0)
