"""Which slots train, which sample, and which do both."""

from __future__ import annotations

import pytest

from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.parallel.placement import shared_slots, slot_faults


@pytest.mark.parametrize(
    ("train_gpus", "first", "shared"),
    [(8, 0, range(4)), (4, 4, range(0)), (6, 4, range(4, 6)), (2, 0, range(2)), (4, 6, range(0))],
)
def test_memory_is_shared_where_both_sides_sit(train_gpus: int, first: int, shared: range) -> None:
    assert sorted(shared_slots([range(train_gpus), range(first, first + 4)])) == list(shared)


def test_any_two_of_several_sides_share() -> None:
    assert sorted(shared_slots([range(2), range(3, 5), range(1, 2), range(4, 6)])) == [1, 4]


@pytest.mark.parametrize(
    ("gpus", "train_gpus", "first", "faulty"),
    [
        (8, 8, 0, []),
        (8, 4, 4, []),
        (6, 4, 2, []),
        (8, 10, 0, ["placement.train_gpus"]),
        (9, 4, 5, ["placement.first_engine_gpu"]),
        (9, 4, 4, ["placement.gpus"]),
    ],
)
def test_every_slot_exists_and_is_used(gpus: int, train_gpus: int, first: int, faulty: list[str]) -> None:
    found = slot_faults(gpus, TrainLayout(train_gpus, 1, 1, 1), EngineLayout(count=2, tp=2, ep=1, first=first))
    assert [fault.where for fault in found] == faulty


@pytest.mark.parametrize(
    ("gpus", "critic", "faulty"),
    [
        (8, range(6, 8), []),
        (6, range(1, 5), []),
        (8, range(6, 9), ["critic.ranks.gpus"]),
        (9, range(7, 9), ["placement.gpus"]),
        (9, range(6, 8), ["placement.gpus"]),
    ],
)
def test_a_critic_has_its_place_behind_the_engines_or_among_them(gpus: int, critic: range, faulty: list[str]) -> None:
    """Two slots train, the next four sample."""
    engines = EngineLayout(count=2, tp=2, ep=1, first=2)
    found = slot_faults(gpus, TrainLayout(2, 1, 1, 1), engines, {"critic": critic})
    assert [fault.where for fault in found] == faulty


def test_the_engines_follow_the_training_ranks_without_a_gap() -> None:
    """Whoever else sits there: it has no part in the exchange."""
    engines = EngineLayout(count=1, tp=2, ep=1, first=4)
    (fault,) = slot_faults(6, TrainLayout(2, 1, 1, 1), engines, {"critic": range(2, 4)})
    assert fault.where == "placement.first_engine_gpu"
