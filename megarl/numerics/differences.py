"""The outputs of two computations of the same tokens, operation by operation: which is the first that differs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.numerics.operations import (
    EXPERTS,
    ORDER,
    ROUTER_CHOICES,
    ROUTER_GROUPS,
    ROUTER_SCORES,
)
from megarl.numerics.parts import OutputPart
from megarl.numerics.wholes import (
    WholeOutput,
    assembled,
    differing_terms,
    exceeds,
    ranks_in,
    shape_of,
    sum_of_parts,
)
from megarl.types.arrays import BoolArray, FloatArray

# the unit roundoff of each type, doubled: the spacing of numbers from 1 on
SPACING = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "fp8": 2.0**-3}


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains after so many operations, relative to the root mean square (RMS) of the output.

    Each operation rounds its output to the type, by half a spacing at most on each side, and sums products of up to
    `width` features in float32; errors of different operations are independent, so that they add as the root of their
    number.
    """

    dtype: str
    width: int
    operations: int

    @property
    def rms(self) -> float:
        """Of the differences' RMS to the outputs'."""
        of_one = SPACING[self.dtype] + SPACING["float32"] * math.sqrt(self.width)
        return of_one * math.sqrt(self.operations)

    def of_elements(self, values_TF: FloatArray) -> FloatArray:
        """[T, F]: what each element may differ by: as many normal deviations as the largest of all is expected at.

        An element that is larger than most may differ by more.
        """
        num_elements = max(values_TF.size, 2)
        deviations = math.sqrt(2 * math.log(num_elements)) + 1.0
        scale_TF = _rms(values_TF) + np.abs(np.nan_to_num(values_TF))
        return (self.rms * deviations * scale_TF).astype(np.float32)


@dataclass(frozen=True)
class Difference:
    """How two outputs of an operation differ.

    largest, rms: relative to the output's RMS. token, feature: where the largest is. ranks: of either side that hold
    values which differ; deviating: of either side, the ranks whose own replicas contradict them. experts: of
    the experts' output, those whose tokens differ.
    """

    layer: int
    operation: str
    largest: float
    rms: float
    allowed_largest: float
    allowed_rms: float
    token: int
    feature: int
    num_differing: int
    num_tokens: int
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    deviating: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    experts: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """By more than rounding explains, between the sides or between replicas of one."""
        return (
            self.num_differing > 0 or self.rms > self.allowed_rms or any(map(len, self.deviating))
        )


@dataclass
class _PartsOfSide:
    """What the ranks of one side recorded, by layer and operation."""

    by_operation: dict[tuple[int, str], list[OutputPart]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @staticmethod
    def of(parts: Sequence[OutputPart]) -> _PartsOfSide:
        side = _PartsOfSide()
        for part in parts:
            if part.values_NF.size:
                side.by_operation[part.layer, part.operation].append(part)
        return side


def compare(
    ours: Sequence[OutputPart], theirs: Sequence[OutputPart], dtype: str
) -> list[Difference]:
    """A difference for each operation that both sides have, in the order of computation.

    dtype: in which the coarser side computes, of `SPACING`.
    """
    sides = _PartsOfSide.of(ours), _PartsOfSide.of(theirs)
    common = [key for key in sides[0].by_operation if key in sides[1].by_operation]
    common = sorted(
        (key for key in common if key[1] in ORDER), key=lambda key: (key[0], ORDER.index(key[1]))
    )
    width = max((part.end_feature for part in [*ours, *theirs]), default=1)
    differences = []
    for number, key in enumerate(common, start=1):
        tolerance = Tolerance(dtype, width, number)
        pair = sides[0].by_operation[key], sides[1].by_operation[key]
        if key[1] == ROUTER_CHOICES:
            difference = _choices(key[0], pair, sides, tolerance)
        else:
            difference = _difference(key, pair, tolerance)
        if key[1] == EXPERTS and difference.differs:
            difference = _with_experts(difference, pair, sides, tolerance)
        differences.append(difference)
    return [difference for difference in differences if difference.num_tokens]


def first_difference(differences: Sequence[Difference]) -> Difference | None:
    """The culprit; None where all agree."""
    return next((difference for difference in differences if difference.differs), None)


Pair = tuple[list[OutputPart], list[OutputPart]]


def _wholes(pair: Pair, tolerance: Tolerance) -> tuple[WholeOutput, WholeOutput, FloatArray]:
    """Both sides' wholes, and what they may differ by."""
    shape = shape_of(*pair)
    naive = [sum_of_parts(parts, shape) for parts in pair]
    # what an error has made of an output must not widen its own tolerance
    smaller_TF = min(naive, key=_rms)
    allowed_TF = tolerance.of_elements(smaller_TF)
    ours = assembled(pair[0], naive[1], allowed_TF)
    theirs = assembled(pair[1], ours.values_TF, allowed_TF)
    return ours, theirs, allowed_TF


def _difference(key: tuple[int, str], pair: Pair, tolerance: Tolerance) -> Difference:
    ours, theirs, allowed_TF = _wholes(pair, tolerance)
    differs_TF = exceeds(ours.odd_TF, theirs.odd_TF, allowed_TF)
    difference_TF = np.abs(ours.odd_TF - theirs.odd_TF)
    scale = min(_rms(ours.values_TF), _rms(theirs.values_TF)) or 1.0
    is_known_T = ~np.isnan(difference_TF).all(1)
    # a value that one side alone failed to compute is the worst
    shown_TF = np.where(differs_TF & np.isnan(difference_TF), np.inf, difference_TF)
    shown_TF = np.nan_to_num(shown_TF, nan=-1.0, posinf=np.inf)
    token, feature = np.unravel_index(int(shown_TF.argmax()), shown_TF.shape)
    ranks = tuple(ranks_in(parts, differs_TF) for parts in pair)
    by_terms = differing_terms(*pair, allowed_TF) if differs_TF.any() else ((), ())
    return Difference(
        layer=key[0],
        operation=key[1],
        largest=max(float(shown_TF[token, feature]), 0.0) / scale,
        rms=_rms(difference_TF) / scale,
        allowed_largest=float(allowed_TF[token, feature]) / scale,
        allowed_rms=tolerance.rms,
        token=int(token),
        feature=int(feature),
        num_differing=int(differs_TF.any(1).sum()),
        num_tokens=int(is_known_T.sum()),
        ranks=(
            ours.deviating or by_terms[0] or ranks[0],
            theirs.deviating or by_terms[1] or ranks[1],
        ),
        deviating=(ours.deviating, theirs.deviating),
    )


def _choices(
    layer: int, pair: Pair, sides: tuple[_PartsOfSide, _PartsOfSide], tolerance: Tolerance
) -> Difference:
    """Of the experts that routers choose: 1 where a token goes to an expert, else 0.

    A choice that differs is explained where the scores that decided it, of experts or of groups, are as near to each
    other as rounding may move them.
    """
    ours, theirs, _ = _wholes(pair, tolerance)
    a_TE, b_TE = (np.nan_to_num(whole.values_TF) > 0 for whole in (ours, theirs))
    is_known_T = ~_any_feature(np.isnan(ours.values_TF) | np.isnan(theirs.values_TF))
    differs_TE = (a_TE != b_TE) & is_known_T[:, None]
    is_tie_T = _ties(layer, sides, a_TE & ~b_TE, b_TE & ~a_TE, tolerance)
    differs_TE &= ~is_tie_T[:, None]
    differing_T = _any_feature(differs_TE)
    token = int(differing_T.argmax())
    return Difference(
        layer=layer,
        operation=ROUTER_CHOICES,
        largest=float(differing_T.any()),
        rms=float(differing_T.sum() / max(is_known_T.sum(), 1)),
        allowed_largest=0.0,
        allowed_rms=0.0,
        token=token,
        feature=int(differs_TE[token].argmax()),
        num_differing=int(differing_T.sum()),
        num_tokens=int(is_known_T.sum()),
        ranks=(ranks_in(pair[0], differs_TE), ranks_in(pair[1], differs_TE)),
        deviating=(ours.deviating, theirs.deviating),
    )


def _ties(
    layer: int,
    sides: tuple[_PartsOfSide, _PartsOfSide],
    only_ours_TE: BoolArray,
    only_theirs_TE: BoolArray,
    tolerance: Tolerance,
) -> BoolArray:
    """[T]: whether rounding explains that the sides chose different experts."""
    is_tie_T = np.zeros(len(only_ours_TE), np.bool_)
    for operation in (ROUTER_SCORES, ROUTER_GROUPS):
        parts = [part for side in sides for part in side.by_operation.get((layer, operation), ())]
        if not parts:
            continue
        scores_TS = sum_of_parts(parts, shape_of(parts))
        near = 2 * float(np.nanmax(tolerance.of_elements(scores_TS)))
        experts_each = only_ours_TE.shape[1] // scores_TS.shape[1]
        ours_TS, theirs_TS = (
            _any_feature(chosen_TE.reshape(-1, experts_each)).reshape(len(chosen_TE), -1)
            for chosen_TE in (only_ours_TE, only_theirs_TE)
        )
        for token in np.flatnonzero(only_ours_TE.any(1) & only_theirs_TE.any(1)):
            ours = scores_TS[token, ours_TS[token]]
            theirs = scores_TS[token, theirs_TS[token]]
            gaps = np.abs(ours[:, None] - theirs[None])
            if operation == ROUTER_SCORES:
                is_tie_T[token] |= bool(gaps.max() <= near)
            elif not (ours_TS[token] & theirs_TS[token]).all():
                # one group in place of another; which experts are then chosen follows from it
                is_tie_T[token] |= bool(gaps.min() <= near)
    return is_tie_T


def _with_experts(
    difference: Difference,
    pair: Pair,
    sides: tuple[_PartsOfSide, _PartsOfSide],
    tolerance: Tolerance,
) -> Difference:
    """With the experts whose tokens alone differ, where there are any: every token of theirs, and no other token."""
    choices = sides[1].by_operation.get((difference.layer, ROUTER_CHOICES))
    if not choices:
        return difference
    ours, theirs, allowed_TF = _wholes(pair, tolerance)
    differs_T = _any_feature(exceeds(ours.values_TF, theirs.values_TF, allowed_TF))
    chosen_TE = np.nan_to_num(sum_of_parts(choices, shape_of(choices)))[: len(differs_T)] > 0
    differs_T = differs_T[: len(chosen_TE)]
    num_chosen_E = chosen_TE.sum(0)
    is_suspect_E = (num_chosen_E > 0) & ((chosen_TE & differs_T[:, None]).sum(0) == num_chosen_E)
    explained_T = _any_feature(chosen_TE[:, is_suspect_E])
    if not is_suspect_E.any() or not explained_T[differs_T].all():
        return difference
    return replace(difference, experts=_fewest(chosen_TE, differs_T, is_suspect_E))


def _fewest(chosen_TE: BoolArray, differs_T: BoolArray, is_suspect_E: BoolArray) -> tuple[int, ...]:
    """Of suspect experts as few as explain all tokens that differ, and those that cannot be told from them."""
    left_T = differs_T.copy()
    experts: list[int] = []
    while left_T.any():
        count_E = (chosen_TE & left_T[:, None]).sum(0) * is_suspect_E
        alike = np.flatnonzero(count_E == count_E.max())
        experts += alike.tolist()
        left_T &= ~_any_feature(chosen_TE[:, alike])
    return tuple(sorted(experts))


def _any_feature(is_TF: BoolArray) -> BoolArray:
    """[T]: whether any feature is True."""
    return np.asarray(is_TF.any(axis=1), np.bool_)


def _rms(values: FloatArray) -> float:
    known = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(known**2))) if known.size else 0.0
