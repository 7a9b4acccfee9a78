"""What a stage does around the calls that it makes, which are stood in for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.controller.stages import settle

STEPS = 3


class Repetition:
    """Excuses a loss, and brings the ranks back before an attempt."""

    def __init__(self, saver: Saver) -> None:
        self.saver = saver
        self.attempts: list[int] = []

    def excuse(self, action: Callable[[], None]) -> None:
        with suppress(WorkerFailed):
            action()

    def attempt(self, step: int, action: Callable[[], None]) -> None:
        self.attempts.append(step)
        self.saver.are_ranks_lost = False
        action()


class Saver:
    """Has a checkpoint open, which lost ranks do not complete."""

    def __init__(self) -> None:
        self.are_ranks_lost = True
        self.is_open = True

    def settle(self, step: int) -> None:
        if self.is_open and self.are_ranks_lost:
            raise WorkerFailed("training rank 0: its process died", "traceback", "training rank 0")
        self.is_open = False


@pytest.mark.parametrize(
    ("step", "is_open", "attempts"), [(STEPS, True, [STEPS]), (STEPS, False, []), (1, True, [])]
)
def test_ranks_that_are_lost_at_the_end_of_a_run_do_not_cost_its_last_checkpoint(
    step: int, is_open: bool, attempts: list[int]
) -> None:
    """At the end of an earlier step the next one makes it good, and without a checkpoint nothing needs the ranks."""
    saver = Saver()
    saver.is_open = is_open
    repetition = Repetition(saver)
    recipe = SimpleNamespace(run=SimpleNamespace(steps=STEPS))
    run: Any = SimpleNamespace(saver=saver, repetition=repetition, recipe=recipe)
    settle(run, step)
    assert repetition.attempts == attempts
    assert saver.is_open == (step < STEPS)
