"""Which training ranks hold the same numbers, to the last bit, and which of them do not. Pure.

The distributed optimizer steps on each number on one rank, and copies the result to its replicas. Weights that tensor
parallelism does not split are stepped on by each rank of it, by the same operations on the same numbers: their
gradients are equal, because an all-reduce gives all of its ranks the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.placement.train_layout import RankCoords, TrainLayout

DENSE = "dense"
DENSE_WHOLE = "dense, not split over TP"
EXPERTS = "experts"
EXPERTS_WHOLE = "experts, not split over ETP"
GRADIENTS = "gradients of what TP does not split"
EXPERT_GRADIENTS = "gradients of what ETP does not split"

# kind of tensors -> where a rank is on the grid but for the axes over which these tensors are equal
KINDS: dict[str, Callable[[RankCoords], tuple[int, ...]]] = {
    DENSE: lambda at: (at.pp, at.tp),
    DENSE_WHOLE: lambda at: (at.pp,),
    EXPERTS: lambda at: (at.pp, at.ep, at.etp),
    EXPERTS_WHOLE: lambda at: (at.pp, at.ep),
    # reduced over data-parallel ranks in part: each rank has the sums of its own shard alone
    GRADIENTS: lambda at: (at.pp, at.dp, at.cp),
    EXPERT_GRADIENTS: lambda at: (at.pp, at.ep, at.edp),
}


@dataclass(frozen=True)
class Disagreement:
    """Ranks whose tensors of a kind should be equal and are not, and those of them that are wrong."""

    kind: str
    ranks: tuple[int, ...]
    wrong: tuple[int, ...]


def replicas(kind: str, layout: TrainLayout) -> list[tuple[int, ...]]:
    """The groups of ranks that hold the same tensors of a kind, every rank in one of them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(KINDS[kind](layout.coords(rank)), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def outvoted(values: Mapping[int, object]) -> tuple[int, ...]:
    """The keys whose value is not that of most keys; all where no value has a majority, none if all are equal."""
    (common, votes), *_ = Counter(values.values()).most_common(1)
    if 2 * votes > len(values):
        return tuple(key for key, value in values.items() if value != common)
    return tuple(values)


def disagreements(kind: str, layout: TrainLayout, values: Sequence[object]) -> list[Disagreement]:
    """The groups of replicas with different values. values: of each rank."""
    found = []
    for ranks in replicas(kind, layout):
        wrong = outvoted({rank: values[rank] for rank in ranks})
        if wrong:
            found.append(Disagreement(kind, ranks, wrong))
    return found
