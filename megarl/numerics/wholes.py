"""The whole output of an operation from the parts of all ranks, and the ranks whose parts contradict their replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.numerics.parts import OutputPart, Terms
from megarl.types.arrays import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class WholeOutput:
    """values_TF: of all tokens, NaN where no rank has them. deviating: ranks whose values others contradict.

    odd_TF: the same with the values of these ranks.
    """

    values_TF: FloatArray
    odd_TF: FloatArray
    deviating: tuple[int, ...] = ()


def shape_of(*sides: Sequence[OutputPart]) -> tuple[int, int]:
    """(tokens, features) of the smallest output that holds all parts."""
    parts = [part for side in sides for part in side]
    num_tokens = max(int(part.tokens_N.max(initial=-1)) + 1 for part in parts)
    return num_tokens, max(part.end_feature for part in parts)


def sum_of_parts(parts: Sequence[OutputPart], shape: tuple[int, int]) -> FloatArray:
    """The whole, where replicas are taken to be equal: the values of the first of them.

    All NaN where no rank recorded some of the terms.
    """
    by_terms = _by_terms(parts)
    if whole := by_terms.get(None):  # the terms beside it are there to tell their ranks
        return _sum({None: whole}, shape)
    if sum((end - first) / count for first, end, count in filter(None, by_terms)) < 1 - 1e-6:
        return np.full(shape, np.nan, np.float32)
    return _sum(by_terms, shape)


def assembled(
    parts: Sequence[OutputPart], expected_TF: FloatArray, allowed_TF: FloatArray
) -> WholeOutput:
    """The whole, of replicas that differ by more than is allowed by the one nearest to what the other side has.

    Replicas of terms are told from each other, but which of them is right is not known: the first is taken.
    """
    chosen: list[OutputPart] = []
    odd: list[OutputPart] = []
    for replicas in _by_place(parts).values():
        first = replicas[0]
        right = first
        if first.terms is None:
            expected_NF = _taken(first, expected_TF)
            right = min(replicas, key=lambda part: _distance(part, expected_NF))
        allowed_NF = _taken(first, allowed_TF)
        odd += [
            part for part in replicas if _exceeds(part.values_NF, right.values_NF, allowed_NF).any()
        ]
        chosen.append(right)
    values_TF = sum_of_parts(chosen, expected_TF.shape)
    # of two parts of a place the first counts
    odd_TF = sum_of_parts([*odd, *chosen], expected_TF.shape) if odd else values_TF
    return WholeOutput(values_TF, odd_TF, _ranks_of(odd))


def ranks_in(parts: Sequence[OutputPart], differs_TF: BoolArray) -> tuple[int, ...]:
    """The ranks that hold values where two wholes differ."""
    return tuple(sorted({part.rank for part in parts if _taken(part, differs_TF).any()}))


def differing_terms(
    ours: Sequence[OutputPart], theirs: Sequence[OutputPart], allowed_TF: FloatArray
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of either side that hold the terms in which two sums differ most; none where a side has no terms.

    Terms are compared in the finest ranges of which both sides' are made.
    """
    shape = shape_of(ours, theirs)
    sides = [[part for part in side if part.terms] for side in (ours, theirs)]
    if not all(sides):
        return (), ()
    worst = 0.0
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    for start, end in _common_ranges(*sides):
        within = [[part for part in side if _is_within(part, start, end)] for side in sides]
        a_TF, b_TF = (_sum(_by_terms(parts), shape) for parts in within)
        excess = float(np.nanmax(np.abs(a_TF - b_TF) / allowed_TF, initial=0.0))
        if excess > max(worst, 1.0):
            worst = excess
            ranks = _ranks_of(within[0]), _ranks_of(within[1])
    return ranks


def exceeds(a_TF: FloatArray, b_TF: FloatArray, allowed_TF: FloatArray) -> BoolArray:
    """[T, F]: where two wholes differ by more than is allowed; a NaN that one computed counts, a gap does not."""
    has_token_T1 = (~np.isnan(a_TF)).any(1, keepdims=True) & (~np.isnan(b_TF)).any(1, keepdims=True)
    return has_token_T1 & _exceeds(a_TF, b_TF, allowed_TF)


def _sum(
    by_terms: Mapping[Terms | None, Sequence[OutputPart]], shape: tuple[int, int]
) -> FloatArray:
    total_TF = np.zeros(shape, np.float32)
    for of_terms in by_terms.values():
        values_TF = np.full(shape, np.nan, np.float32)
        for part in reversed(of_terms):
            _place(part, values_TF)
        total_TF += values_TF
    return total_TF


def _exceeds(a: FloatArray, b: FloatArray, allowed: FloatArray) -> BoolArray:
    """What is not finite exceeds everything that it does not equal."""
    with np.errstate(invalid="ignore"):
        is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
        return ~is_equal & ~(np.abs(a - b) <= allowed)


def _by_terms(parts: Sequence[OutputPart]) -> dict[Terms | None, list[OutputPart]]:
    grouped: defaultdict[Terms | None, list[OutputPart]] = defaultdict(list)
    for part in parts:
        grouped[part.terms].append(part)
    return grouped


def _by_place(parts: Sequence[OutputPart]) -> dict[object, list[OutputPart]]:
    """Parts of equal tokens, features and terms: replicas."""
    grouped: defaultdict[object, list[OutputPart]] = defaultdict(list)
    for part in parts:
        place = part.terms, part.first_feature, part.values_NF.shape, part.tokens_N.tobytes()
        grouped[place].append(part)
    return grouped


def _place(part: OutputPart, values_TF: FloatArray) -> None:
    values_TF[part.tokens_N, part.first_feature : part.end_feature] = part.values_NF


def _taken(part: OutputPart, values_TF: np.ndarray) -> np.ndarray:
    return values_TF[part.tokens_N, part.first_feature : part.end_feature]


def _distance(part: OutputPart, expected_NF: FloatArray) -> float:
    distance = float(np.abs(part.values_NF - expected_NF).max(initial=0.0))
    return distance if np.isfinite(distance) else np.inf


def _ranks_of(parts: Sequence[OutputPart]) -> tuple[int, ...]:
    return tuple(sorted({part.rank for part in parts}))


def _is_within(part: OutputPart, start: float, end: float) -> bool:
    assert part.terms
    first, last, count = part.terms
    return first / count >= start and last / count <= end


def _common_ranges(*sides: Sequence[OutputPart]) -> list[tuple[float, float]]:
    """Ranges of [0, 1] between the borders that all sides' terms have."""
    borders = [
        {part.terms[0] / part.terms[2] for part in side if part.terms} | {1.0} for side in sides
    ]
    common = sorted(set.intersection(*borders))
    return list(zip(common[:-1], common[1:], strict=True))
