"""Packing of pieces into the rows of micro-batches, which one rank has or several split among them. Numbers alone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.types import IntArray

Bin = list[int]  # places in a Load


@dataclass(frozen=True)
class Load:
    """Pieces, of most tokens first, with the tokens [N] that each takes of a row, padding included, and its work [N].

    ranks [N]: the fewest, a power of two, whose budgets together hold the piece.
    """

    tokens: IntArray
    work: npt.NDArray[np.float64]
    ranks: IntArray

    def sizes(self, bins: Iterable[Bin]) -> IntArray:
        """The ranks that split the row of each bin: as many as its longest piece needs."""
        return np.array([self.ranks[places[0]] if places else 1 for places in bins], np.int64)


def fill(load: Load, tight: list[Bin], places: int, ranks: int, budget: int) -> list[Bin]:
    """Micro-batches for so many places on each rank, alike in work if they can be. tight: as best-fit found them."""
    count = places * ranks
    long = load.ranks[load.ranks > 1]
    if long.sum() <= count:
        sizes = np.append(long, np.ones(count - long.sum(), np.int64))
        for weights, start in (
            (load.work, _head_start(load, sizes, ranks)),
            (load.tokens, np.zeros(len(sizes))),
        ):
            bins = least_first(load, weights, start, budget * sizes, sizes)
            if bins is not None:
                return bins
    return tight + [[] for _ in range(count - load.sizes(tight).sum())]


def best_fit(load: Load, budget: int) -> list[Bin]:
    """Each, longest first, where it leaves the least room, or into a new one (Johnson, 1973: up to 11/9 of fewest)."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, place in bins), ascending
    for place, need in enumerate(load.tokens.tolist()):
        at = bisect.bisect_left(room, (need, -1))
        if at < len(room):
            left, index = room.pop(at)
        else:
            left = budget * int(load.ranks[place])
            index = len(bins)
            bins.append([])
        bins[index].append(place)
        bisect.insort(room, (left - need, index))
    return bins


def _head_start(load: Load, sizes: IntArray, ranks: int) -> npt.NDArray[np.float64]:
    """Work [micro-batches] that each of their ranks is taken to have, so that they come out alike at each place.

    A sample that is more work than the mean of micro-batches is waited for by the other ranks: theirs at its place may
    be as heavy, and all others then lighter. sizes: the ranks that split each micro-batch.
    """
    heaviest_first = -np.sort(-np.repeat(load.work / load.ranks, load.ranks))
    targets = []
    left = load.work.sum() / ranks
    places = int(sizes.sum()) // ranks
    for place in range(places):
        if place * ranks < len(heaviest_first):
            heaviest = heaviest_first[place * ranks]
        else:
            heaviest = 0.0
        targets.append(max(heaviest, left / (places - place)))
        left = max(0.0, left - targets[-1])
    return (max(targets) - np.array(targets))[(np.cumsum(sizes) - sizes) // ranks]


def least_first(
    load: Load,
    weights: npt.NDArray[Any],
    start: npt.NDArray[np.float64],
    room: IntArray,
    sizes: IntArray | int = 1,
) -> list[Bin] | None:
    """Each, longest first, into the lightest that has room (Graham, 1969), or None. start: what they weigh empty.

    room: tokens [bins]. sizes: the ranks that split each; the first ones are for the pieces that one cannot hold.
    """
    bins: list[Bin] = [[] for _ in start]
    sizes = np.broadcast_to(sizes, len(start))
    num_long = int(np.count_nonzero(sizes > 1))
    room = room.copy()
    weight = start.copy()
    for place, need in enumerate(load.tokens):
        if place < num_long:
            index = place
        else:
            index = int(np.where(room >= need, weight, np.inf).argmin())
        if room[index] < need:
            return None
        bins[index].append(place)
        room[index] -= need
        weight[index] += weights[place] / sizes[index]
    return bins


def sets(order: Sequence[int], sizes: IntArray, dp: int) -> list[list[int]]:
    """The micro-batches of each place, which together take all ranks once, as near to the order as that can be.

    Sizes are powers of two, the largest of which divides dp, and together multiples of dp: a set that lacks ranks
    finds some micro-batch that fits, since larger ones alone could not add up.
    """
    chosen_sets: list[list[int]] = []
    remaining = list(order)
    while remaining:
        chosen: list[int] = []
        later: list[int] = []
        room = dp
        for number, index in enumerate(remaining):
            if room == 0:
                later += remaining[number:]
                break
            if sizes[index] <= room:
                chosen.append(index)
                room -= int(sizes[index])
            else:
                later.append(index)
        chosen_sets.append(chosen)
        remaining = later
    return chosen_sets


def placed(
    chosen: Sequence[int], sizes: IntArray, totals: npt.NDArray[np.float64]
) -> Iterator[tuple[int, int]]:
    """(first rank, micro-batch) of a set: those of many ranks first, on ranks whose number their size divides.

    Of equal sizes the heaviest goes to the ranks that have had the least.
    """
    had = totals.copy()
    for size in sorted({int(sizes[index]) for index in chosen}, reverse=True):
        blocks = had.reshape(-1, size).max(1)
        least_first = np.argsort(blocks, kind="stable").tolist()
        alike = [index for index in chosen if sizes[index] == size]
        for block, index in zip(least_first, alike, strict=False):
            had[block * size : (block + 1) * size] = np.inf
            yield block * size, index
