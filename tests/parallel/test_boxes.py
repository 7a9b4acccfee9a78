"""The boxes of a range of elements hold each of them once, in order, and are few."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.boxes import Box, boxes

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape, and the first and the last number of a range of its elements."""
    shape = draw(shapes)
    ends = st.integers(0, math.prod(shape))
    start, end = sorted((draw(ends), draw(ends)))
    return shape, start, end


@given(ranges(), st.integers(1, 60))
def test_each_element_of_the_range_is_in_one_box(
    place: tuple[tuple[int, ...], int, int], most: int
) -> None:
    shape, start, end = place
    numbers = np.arange(math.prod(shape)).reshape(shape)
    position = start
    for box in boxes(shape, start, end, most):
        inside = tuple(
            slice(offset, offset + size)
            for offset, size in zip(box.offsets, box.sizes, strict=True)
        )
        held = numbers[inside].ravel()
        assert box.start == position and 1 <= len(held) <= most
        assert held.tolist() == list(range(box.start, box.end))
        position = box.end
    assert position == end


@given(ranges())
def test_a_range_is_few_boxes(place: tuple[tuple[int, ...], int, int]) -> None:
    """Of a matrix at most three: a part of its first row, whole rows, a part of its last."""
    shape, start, end = place
    assert len(list(boxes(shape, start, end, math.prod(shape) + 1))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "end", "most", "expected"),
    [
        ((4, 5), 3, 17, 99, [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]),
        ((4, 5), 5, 20, 10, [((1, 0), (2, 5)), ((3, 0), (1, 5))]),
        ((2, 5), 0, 10, 3, [((0, 0), (1, 3)), ((0, 3), (1, 2)), ((1, 0), (1, 3)), ((1, 3), (1, 2))]),
        ((7,), 2, 6, 99, [((2,), (4,))]),
        ((), 0, 1, 99, [((), ())]),
        ((3, 2), 4, 4, 99, []),
    ],
)  # fmt: skip
def test_boxes_by_hand(
    shape: tuple[int, ...], start: int, end: int, most: int, expected: list[tuple[object, object]]
) -> None:
    assert [box[1:] for box in boxes(shape, start, end, most)] == expected


def test_a_box_knows_where_its_elements_end() -> None:
    assert Box(4, (2, 0), (3, 2)).end == 10
