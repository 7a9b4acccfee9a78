"""Which slots several processes share."""

from __future__ import annotations

import pytest

from megarl.parallel.placement import shared_slots


@pytest.mark.parametrize(
    ("train_gpus", "first", "shared"),
    [(8, 0, range(4)), (4, 4, range(0)), (6, 4, range(4, 6)), (2, 0, range(2)), (4, 6, range(0))],
)
def test_memory_is_shared_where_both_sides_sit(train_gpus: int, first: int, shared: range) -> None:
    assert sorted(shared_slots([range(train_gpus), range(first, first + 4)])) == list(shared)


def test_any_two_of_several_sides_share() -> None:
    assert sorted(shared_slots([range(2), range(3, 5), range(1, 2), range(4, 6)])) == [1, 4]
