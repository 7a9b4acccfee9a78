"""The shards of a family's blocks: what a rank's part of a layout is, as rectangles of the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from megarl.model.families.blocks import bias_of
from megarl.model.families.layouts import Layout, ParamPart
from megarl.resharding.shards import Range, Shard, intersect, share

_KEPT = 1 << 16  # layouts x ranks, of one model


class Strip(NamedTuple):
    """Rows or columns of a tensor that follow each other in the tensor and in the parameter, there from `at` on."""

    name: str
    extent: Range
    at: int


class Grid(NamedTuple):
    """The ranks that split a parameter, and which of them is meant; for experts, the ranks that split their number."""

    ranks: int = 1
    rank: int = 0
    item_ranks: int = 1
    item_rank: int = 0


@lru_cache(maxsize=_KEPT)
def strips(layout: Layout, ranks: int, rank: int) -> tuple[Strip, ...]:
    """The strips of part `rank` of `ranks` different parts, in the order of the parameter."""
    wanted = share(layout.total, ranks, rank)
    found: list[Strip] = []
    start = 0
    for name, extent in _whole(layout):
        end = start + extent[1] - extent[0]
        first, last = intersect((start, end), wanted)
        if first < last:
            held = extent[0] + first - start, extent[0] + last - start
            found.append(Strip(name, held, first - wanted[0]))
        start = end
    return tuple(_merged(found))


def _whole(layout: Layout) -> Iterator[tuple[str, Range]]:
    """The strips of a parameter that is not split."""
    for group in range(layout.groups):
        for piece in layout.pieces:
            first, last = share(piece.units, layout.groups, group)
            if piece.step == piece.size:
                start = piece.first + first * piece.size
                yield piece.name, (start, start + (last - first) * piece.size)
                continue
            for unit in range(first, last):
                start = piece.first + unit * piece.step
                yield piece.name, (start, start + piece.size)


def _merged(found: Sequence[Strip]) -> list[Strip]:
    """The strips, where one goes on in the next made one."""
    merged: list[Strip] = []
    for strip in found:
        before = merged[-1] if merged else None
        if before and before.name == strip.name and before.extent[1] == strip.extent[0]:
            merged[-1] = before._replace(extent=(before.extent[0], strip.extent[1]))
        else:
            merged.append(strip)
    return merged


def offsets(entries: Sequence[ParamPart], parts: Sequence[int]) -> list[int]:
    """The row at which each entry begins in its parameter. parts: into how many each entry's layout is split."""
    rows_by_param: dict[str, int] = {}
    starts = []
    for entry, count in zip(entries, parts, strict=True):
        start = rows_by_param.get(entry.param, 0)
        starts.append(start)
        rows_by_param[entry.param] = start + entry.layout.total // count
    return starts


def entry_shards(entry: ParamPart, param: str, start: int, grid: Grid) -> Iterator[Shard]:
    """The shards of one part of an entry, from row `start` of the parameter on, and of the biases, if it has them."""
    piece = entry.layout.pieces[0]
    items = share(piece.items, grid.item_ranks, grid.item_rank)
    across = (0, piece.across)
    for name, extent, at in strips(entry.layout, grid.ranks, grid.rank):
        if piece.is_cols:
            yield Shard(name, across, extent, param, (0, 0, at), items, entry.dtype)
            continue
        row = start + at
        yield Shard(name, extent, across, param, (0, row, 0), items, entry.dtype)
        if entry.bias:
            yield Shard(bias_of(name), extent, (0, 1), bias_of(param), (0, row, 0))
