"""The groups of replicas are those of the weight map, and a vote names who is alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.model.shape import ModelShape
from megarl.placement.replicas import (
    DENSE,
    DENSE_WHOLE,
    EXPERT_GRADIENTS,
    EXPERTS,
    GRADIENTS,
    KINDS,
    Disagreement,
    disagreements,
    outvoted,
    replicas,
)
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.megatron_map import parts

SHAPE = ModelShape(4, 128, 8, 4, 16, 200, num_experts=8, experts_per_token=2, moe_ffn_size=128)
LAYOUTS = [
    TrainLayout(8, 2, 2, 2),
    TrainLayout(8, 2, 1, 4, cp=2),
    TrainLayout(16, 2, 2, 2, expert_tp=2),
    TrainLayout(4, 1, 1, 1),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_have_the_replicas_of_the_weight_map(layout: TrainLayout) -> None:
    of_map = sorted(part.members for part in parts(SHAPE, layout))
    assert sorted(replicas(DENSE, layout) + replicas(EXPERTS, layout)) == of_map


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_in_one_group(kind: str, layout: TrainLayout) -> None:
    counts = Counter(rank for ranks in replicas(kind, layout) for rank in ranks)
    assert counts == Counter(range(layout.world_size))


def test_what_is_not_split_has_replicas_over_more_axes() -> None:
    layout = TrainLayout(8, 2, 2, 2)
    assert replicas(DENSE, layout) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert replicas(DENSE_WHOLE, layout) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert replicas(GRADIENTS, layout) == [(0, 1), (2, 3), (4, 5), (6, 7)], "each DP rank's own"
    with_etp = TrainLayout(8, 4, 1, 2, expert_tp=2)
    assert replicas(EXPERT_GRADIENTS, with_etp) == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([5, 5, 5], ()),
        ([5, 6, 5], (1,)),
        ([5, 6], (0, 1)),
        ([5, 6, 6, 5], (0, 1, 2, 3)),
        ([5, 6, 7], (0, 1, 2)),
        ([5, 5, 5, 6, 7], (3, 4)),
        ([5], ()),
    ],
)
def test_the_majority_is_right(values: list[int], wrong: tuple[int, ...]) -> None:
    assert outvoted(dict(enumerate(values))) == wrong


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_whoever_is_right_agrees_with_more_than_half(values: list[int]) -> None:
    wrong = outvoted(dict(enumerate(values)))
    right = [value for rank, value in enumerate(values) if rank not in wrong]
    assert len({*right}) <= 1
    assert not right or 2 * len(right) > len(values)
    assert right or 2 * max(Counter(values).values()) <= len(values)


def test_each_group_votes_for_itself() -> None:
    layout = TrainLayout(8, 2, 1, 2)
    values = [1, 9, 1, 9, 2, 9, 1, 8]
    assert disagreements(DENSE, layout, values) == [
        Disagreement(DENSE, (0, 2, 4, 6), (4,)),
        Disagreement(DENSE, (1, 3, 5, 7), (7,)),
    ]
    assert disagreements(DENSE, layout, [1, 9] * 4) == []
