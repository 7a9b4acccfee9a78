"""Which member is given up after an exchange has failed again: two engines of two ranks, and a rank without one."""

from __future__ import annotations

import pytest

from megarl.placement.engine_layout import EngineLayout
from megarl.recovery.suspicion import Suspicion

RANK = 4  # the first slot behind the engines


@pytest.mark.parametrize(
    ("attempts", "given_up"),
    [
        ([[], []], None),
        ([[3], [3]], 3),
        # by itself, now: the failure before may have been another's
        ([[1], [2]], 2),
        # ends of connections: the one that both have
        ([[0, 3], [2, 0]], 0),
        # the likelier one first
        ([[], [2, 0]], 2),
        # the loss of a rank costs more
        ([[RANK, 0], [RANK, 0]], 0),
        ([[RANK], [RANK]], RANK),
    ],
)
def test_who_is_to_blame(attempts: list[list[int]], given_up: int | None) -> None:
    suspicion = Suspicion(EngineLayout(2, 2, 1))
    for suspects in attempts:
        suspicion.note(suspects)
    assert suspicion.give_up() == given_up


def test_each_of_two_that_nothing_tells_apart_has_its_turn() -> None:
    suspicion = Suspicion(EngineLayout(2, 2, 1))
    given_up = []
    suspicion.note([RANK, 1])
    for suspects in ([1, RANK], [1, RANK]):
        suspicion.note(suspects)
        given_up.append(suspicion.give_up())
    assert given_up == [1, RANK]
    suspicion.note([2, 0])  # another rank of the engine that was given up
    assert suspicion.give_up() == 2
