"""Maps against parameters: what `verify_params` accepts and what it names, and the arithmetic of boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import sglang_map
from megarl.resharding.shards import (
    Box,
    LayoutError,
    Shard,
    intersect_boxes,
    overlap,
    param_table,
    verify_params,
)

SHAPE = ModelShape(2, 6, 8, 4, 2, 300, num_experts=8, experts_per_token=2, moe_ffn_size=16)
Tensors = dict[str, torch.Tensor]


def model_params(shards: list[Shard]) -> Tensors:
    return {name: torch.zeros(size) for name, size in param_table(shards).items()}


def test_verify_accepts_three_dimensions_vectors_and_padding() -> None:
    shards = sglang_map.shards(SHAPE, EngineLayout(1, 2, 1), 0)
    params = model_params(shards)
    params["model.norm.weight"] = torch.zeros(6)
    params["lm_head.weight"] = torch.zeros(192, 6)
    verify_params(shards, params)


def change(name: str, tensor: torch.Tensor | None):
    return lambda params: params.pop(name) if tensor is None else params.update({name: tensor})


BREAKS = [
    (change("model.norm.weight", None), r"model\.norm\.weight: the model has no such parameter"),
    (change("model.extra.bias", torch.zeros(3)), r"model\.extra\.bias: the map does not know"),
    (
        change("model.norm.weight", torch.zeros(7)),
        r"model\.norm\.weight: the map needs \[1, 6, 1\]",
    ),
    (
        change("lm_head.weight", torch.zeros(149, 6)),
        r"lm_head\.weight: the map needs \[1, 160, 6\]",
    ),
    (
        change("model.layers.1.mlp.experts.w2_weight", torch.zeros(8, 16, 6)),
        r"layers\.1\.mlp\.experts\.w2_weight",
    ),
    (
        change("lm_head.weight", torch.zeros(6, 192).t()),
        r"lm_head\.weight: the parameter is not contiguous",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BREAKS)
def test_verify_names_the_parameter(damage, message: str) -> None:
    shards = sglang_map.shards(SHAPE, EngineLayout(1, 2, 1), 0)
    params = model_params(shards)
    damage(params)
    with pytest.raises(LayoutError, match=message):
        verify_params(shards, params)


def test_verify_sees_holes_and_overlaps() -> None:
    hole = [Shard("a", (0, 2), (0, 4), "p"), Shard("b", (0, 1), (0, 2), "p", (0, 2, 2))]
    with pytest.raises(LayoutError, match="p: the map does not cover every element"):
        verify_params(hole, {"p": torch.zeros(3, 4)})
    same_area = [Shard("a", (0, 2), (0, 2), "p"), Shard("b", (0, 2), (0, 1), "p", (0, 1, 1))]
    with pytest.raises(LayoutError, match="p: the map covers an element twice"):
        verify_params(same_area, {"p": torch.zeros(3, 2)})


ranges = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))
boxes = st.tuples(ranges, ranges, ranges)


def elements(box: Box) -> set[tuple[int, int, int]]:
    items, rows, cols = (range(*side) for side in box)
    return {(item, row, col) for item in items for row in rows for col in cols}


@given(st.lists(boxes, max_size=5))
def test_boxes_overlap_where_their_elements_do(found: list[Box]) -> None:
    assert bool(overlap(found)) == (
        sum(map(len, map(elements, found))) > len(set().union(*map(elements, found)))
    )


@given(boxes, boxes)
def test_the_common_part_is_that_of_the_elements(a: Box, b: Box) -> None:
    common = intersect_boxes(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
