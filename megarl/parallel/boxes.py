"""A range of a tensor's elements as boxes, which are what the index of a checkpoint can name.

An optimizer that is sharded over data-parallel ranks cuts a buffer of parameters at any element, so that a rank holds a
range of a parameter's elements in row-major order. A checkpoint of torch.distributed has boxes: offsets and sizes in
each dimension. A range of a matrix is at most three of them: the end of a row, whole rows, and the beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CHUNK_BYTES = 128 << 20  # of a box in a checkpoint's file at most


class Box(NamedTuple):
    """Elements that follow one another in a tensor. start: the number of the first; offsets and sizes: by dimension."""

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, end: int, most: int) -> Iterator[Box]:
    """The boxes of at most `most` elements that hold the elements from `start` to `end`, in their order.

    shape: of the whole tensor, whose elements are numbered in row-major order.
    """
    if not shape:
        yield from (Box(number, (), ()) for number in range(start, end))
        return
    inner_shape = tuple(shape[1:])
    row = math.prod(inner_shape)
    while start < end:
        index, place = divmod(start, row)
        num_whole = min(most, end - start) // row if place == 0 else 0
        if num_whole:
            whole = Box(start, (index, *(0 for _ in inner_shape)), (num_whole, *inner_shape))
            yield whole
            start = whole.end
            continue
        row_start = index * row
        stop = min(end, row_start + row)
        for inner in boxes(inner_shape, place, stop - row_start, most):
            yield Box(row_start + inner.start, (index, *inner.offsets), (1, *inner.sizes))
        start = stop
