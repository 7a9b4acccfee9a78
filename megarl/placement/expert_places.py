"""Which expert each expert slot of an engine holds, chosen by the load of the experts. Pure.

An engine has as many slots in a layer as the model has experts; expert-parallel rank r of R has the slots
[r * E / R, (r + 1) * E / R). Numbered, slot s holds expert s. A token waits in each layer for the rank with the most
tokens, so the busiest rank over the mean rank is the factor by which imbalance stretches a layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# of the layers with experts, in their order: the expert in each slot
Places = tuple[tuple[int, ...], ...]

# of the mean rank's tokens: by so much the busiest rank must lose for experts to move, since loads of two steps differ
LEAST_GAIN = 0.02


def numbered(num_layers: int, num_experts: int) -> Places:
    """Slot s holds expert s in every layer."""
    return (tuple(range(num_experts)),) * num_layers


def rank_loads(load_E: npt.NDArray[np.int64], places: Sequence[int], ranks: int) -> npt.NDArray:
    """The tokens of each expert-parallel rank in one layer."""
    return load_E[np.asarray(places)].reshape(ranks, -1).sum(axis=1)


def imbalance(load_LE: npt.NDArray[np.int64], places: Places, ranks: int) -> float:
    """Tokens of the busiest rank over the mean rank's, of the mean layer; 1 where nothing was counted."""
    loads_LR = np.stack(
        [rank_loads(load_E, row, ranks) for load_E, row in zip(load_LE, places, strict=True)]
    )
    means_L = loads_LR.mean(axis=1)
    counted_L = means_L > 0
    if not counted_L.any():
        return 1.0
    return float((loads_LR.max(axis=1)[counted_L] / means_L[counted_L]).mean())


def place_experts(load_LE: npt.NDArray[np.int64], places: Places, ranks: int) -> Places:
    """The slots of all layers for this load.

    load_LE: tokens that chose each expert. places: where the experts are now. A layer in which the busiest rank would
    not lose LEAST_GAIN of a mean rank's tokens stays as it is, so that no layer is worse than before.
    """
    return tuple(
        _layer_places(load_E, row, ranks) for load_E, row in zip(load_LE, places, strict=True)
    )


def _layer_places(
    load_E: npt.NDArray[np.int64], places: tuple[int, ...], ranks: int
) -> tuple[int, ...]:
    """One layer: longest processing time first (Graham 1969), each rank having equally many slots.

    A rank's experts are in ascending order: neighbours then are one box of an exchange.
    """
    per_rank = len(load_E) // ranks
    experts_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    most = 0
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap of (tokens, rank)
    for expert in np.argsort(-load_E, kind="stable").tolist():
        (tokens, rank) = heapq.heappop(open_ranks)
        experts_by_rank[rank].append(expert)
        tokens += int(load_E[expert])
        most = max(most, tokens)
        if len(experts_by_rank[rank]) < per_rank:
            heapq.heappush(open_ranks, (tokens, rank))
    gain = int(rank_loads(load_E, places, ranks).max()) - most
    if gain <= LEAST_GAIN * float(load_E.sum()) / ranks:
        return places
    return tuple(expert for experts in experts_by_rank for expert in sorted(experts))
