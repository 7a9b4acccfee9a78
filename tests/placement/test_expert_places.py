"""Properties of the placement of experts: slots are filled once, no layer gets worse, nothing moves for nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.placement.expert_places import (
    LEAST_GAIN,
    imbalance,
    numbered,
    place_experts,
    rank_loads,
)

LOADS = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 3)).flatmap(
    lambda sizes: st.tuples(
        st.just(sizes[0]),
        st.lists(
            st.lists(st.integers(0, 1000), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]),
            min_size=sizes[2],
            max_size=sizes[2],
        ),
    )
)  # fmt: skip


@given(LOADS, st.randoms())
def test_every_slot_is_filled_once_no_layer_is_worse_and_a_second_time_nothing_moves(
    case: tuple[int, list[list[int]]], random: object
) -> None:
    ranks, loads = case
    load_LE = np.array(loads)
    (num_layers, num_experts) = load_LE.shape
    before = tuple(
        tuple(random.sample(range(num_experts), num_experts))  # type: ignore[attr-defined]
        for _ in range(num_layers)
    )
    after = place_experts(load_LE, before, ranks)
    for load_E, old, new in zip(load_LE, before, after, strict=True):
        assert sorted(new) == list(range(num_experts))
        lost = rank_loads(load_E, old, ranks).max() - rank_loads(load_E, new, ranks).max()
        assert new == old or lost > LEAST_GAIN * load_E.sum() / ranks
    assert place_experts(load_LE, after, ranks) == after


@given(LOADS)
def test_equal_loads_stay_as_numbered(case: tuple[int, list[list[int]]]) -> None:
    ranks, loads = case
    even_LE = np.full_like(np.array(loads), 7)
    places = numbered(*even_LE.shape)
    assert place_experts(even_LE, places, ranks) == places
    assert imbalance(even_LE, places, ranks) == 1.0


def test_a_hand_computed_layer() -> None:
    """9, 8, 2, 1 on two ranks: 17 and 3 as numbered, 10 and 10 placed."""
    load_LE = np.array([[9, 8, 2, 1]])
    places = numbered(1, 4)
    assert imbalance(load_LE, places, 2) == pytest.approx(1.7)
    placed = place_experts(load_LE, places, 2)
    assert placed == ((0, 3, 1, 2),)
    assert imbalance(load_LE, placed, 2) == 1.0
    assert imbalance(np.zeros((1, 4), np.int64), places, 2) == 1.0


def test_the_gain_of_the_survey() -> None:
    """256 experts of log-normal popularity (0.3) on 64 ranks, placed by one draw of it and judged by another."""
    random = np.random.default_rng(0)
    popularity = random.lognormal(0.0, 0.3, (8, 256))
    draws = [
        np.stack([random.multinomial(4096 * 8, row / row.sum()) for row in popularity])
        for _ in range(2)
    ]
    as_numbered = numbered(8, 256)
    placed = place_experts(draws[0], as_numbered, 64)
    assert imbalance(draws[1], as_numbered, 64) > 1.3
    assert imbalance(draws[1], placed, 64) < 1.2
