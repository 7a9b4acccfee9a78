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
    ROUTER_LOGITS,
    ROUTER_SCORES,
)
from megarl.numerics.parts import AnyPart, OutputPart
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

# what the errors of any number of operations come to at most: norms and residuals keep them from growing on; of fp8,
# weights and inputs of each linear layer are off by some 4 %
LARGEST_RMS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02, "fp8": 0.3}

_DEPENDENCE = 1.5


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains after so many operations, relative to the root mean square (RMS) of the output.

    Each operation rounds its output to the type, by half a spacing at most on each side, and sums products of up to
    `width` features in float32; errors of different operations are independent, so that they add as the root of their
    number, up to LARGEST_RMS.
    """

    dtype: str
    width: int
    operations: int

    @property
    def rms(self) -> float:
        """Of the differences' RMS to the outputs'."""
        of_one = SPACING[self.dtype] + SPACING["float32"] * math.sqrt(self.width)
        return min(of_one * math.sqrt(self.operations), LARGEST_RMS[self.dtype])

    def of_tokens(self, values_TF: FloatArray) -> FloatArray:
        """[T]: what the RMS of each token's differences may be: less than its elements' may, which are many.

        A token that is larger than most may differ by more; half again as much is for errors that are not independent.
        """
        num_tokens, num_features = values_TF.shape
        deviations = math.sqrt(2 * math.log(max(num_tokens, 2))) + 1.0
        scale_T = _rms(values_TF) + _rms_of_tokens(np.nan_to_num(values_TF))
        allowed = self.rms * (_DEPENDENCE + deviations / math.sqrt(2 * num_features))
        return (allowed * scale_T).astype(np.float32)

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

    largest, rms: relative to the output's RMS. token, feature: where the largest is. token_rms: of the differences of
    the token that exceeds what is allowed by most. ranks: of either side that hold
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
    token_rms: float = 0.0
    allowed_token_rms: float = 0.0
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

    by_operation: dict[tuple[int, str], list[AnyPart]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @staticmethod
    def of(parts: Sequence[AnyPart]) -> _PartsOfSide:
        side = _PartsOfSide()
        for part in parts:
            if not part.is_empty:
                side.by_operation[part.layer, part.operation].append(part)
        return side

    def parts(self, layer: int, operation: str) -> list[OutputPart]:
        """In memory as long as the caller has them; [] where there are none."""
        return [part.loaded() for part in self.by_operation.get((layer, operation), ())]


def compare(ours: Sequence[AnyPart], theirs: Sequence[AnyPart], dtype: str) -> list[Difference]:
    """A difference for each operation that both sides have, in the order of computation; one is in memory at a time.

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
        pair = sides[0].parts(*key), sides[1].parts(*key)
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


@dataclass(frozen=True)
class LeftOut:
    """An operation that was not compared.

    has_ours, has_theirs: whether a side recorded it; where both did, no token is whole on both.
    """

    layer: int
    operation: str
    has_ours: bool
    has_theirs: bool


def left_out(
    ours: Sequence[AnyPart], theirs: Sequence[AnyPart], differences: Sequence[Difference]
) -> list[LeftOut]:
    """What either side recorded and `compare` has no difference of, in the order of computation."""
    compared = {(difference.layer, difference.operation) for difference in differences}
    recorded = [{(part.layer, part.operation) for part in parts} for parts in (ours, theirs)]
    keys = [key for key in (recorded[0] | recorded[1]) - compared if key[1] in ORDER]
    keys.sort(key=lambda key: (key[0], ORDER.index(key[1])))
    return [LeftOut(*key, key in recorded[0], key in recorded[1]) for key in keys]


def unchecked_layers(differences: Sequence[Difference], num_layers: int) -> list[int]:
    """The layers of a model of which no operation was compared."""
    return sorted(set(range(num_layers)) - {difference.layer for difference in differences})


Pair = tuple[list[OutputPart], list[OutputPart]]


def _wholes(pair: Pair, tolerance: Tolerance) -> tuple[WholeOutput, WholeOutput, FloatArray]:
    """Both sides' wholes, and what their elements may differ by."""
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
    difference_TF = np.abs(ours.odd_TF - theirs.odd_TF)
    smaller_TF = min((ours.values_TF, theirs.values_TF), key=_rms)
    rms_T = _rms_of_tokens(difference_TF)
    allowed_T = tolerance.of_tokens(smaller_TF)
    differs_TF = exceeds(ours.odd_TF, theirs.odd_TF, allowed_TF)
    # of a token that is wrong as a whole, what is not small in it
    is_wrong_T: BoolArray = np.greater(rms_T, allowed_T)
    differs_TF |= is_wrong_T[:, None] & (difference_TF >= rms_T[:, None])
    worst = int((rms_T / np.maximum(allowed_T, 1e-30)).argmax())
    scale = min(_rms(ours.values_TF), _rms(theirs.values_TF)) or 1.0
    is_known_T = ~np.isnan(difference_TF).all(1)
    # a value that one side alone failed to compute is the worst
    shown_TF = np.where(differs_TF & np.isnan(difference_TF), np.inf, difference_TF)
    shown_TF = np.nan_to_num(shown_TF, nan=-1.0, posinf=np.inf)
    if differs_TF.any():
        # what is small everywhere is shown in the token that is wrong as a whole
        shown_TF = np.where(_any_feature(differs_TF)[:, None], shown_TF, -1.0)
    if is_wrong_T.any():
        # the token whose figures are told
        shown_TF[np.arange(len(shown_TF)) != worst] = -1.0
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
        token_rms=float(rms_T[worst]) / scale,
        allowed_token_rms=float(allowed_T[worst]) / scale,
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
    is_tie_T = _ties(layer, sides, a_TE, b_TE, tolerance)
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
    ours_TE: BoolArray,
    theirs_TE: BoolArray,
    tolerance: Tolerance,
) -> BoolArray:
    """[T]: whether rounding explains that the sides chose different experts.

    Each expert that one side alone chose must be as near to each that the other alone chose as their scores have moved.
    """
    is_tie_T = np.zeros(len(ours_TE), np.bool_)
    scores_TE = _router_output(ROUTER_SCORES, layer, sides)
    if scores_TE is None:
        return is_tie_T
    moved_TE = _moved_scores(layer, sides, scores_TE, tolerance)
    groups_TG = _router_output(ROUTER_GROUPS, layer, sides)
    for token in np.flatnonzero((ours_TE != theirs_TE)[: len(scores_TE)].any(1)):
        pair = ours_TE[token], theirs_TE[token]
        if pair[0].sum() == pair[1].sum():
            scores = scores_TE[token], moved_TE[token]
            is_tie_T[token] = _is_tie(*scores, pair, pair_open=None)
            if groups_TG is not None and _is_group_tie(groups_TG[token], scores[1], pair):
                num_groups = groups_TG.shape[1]
                pair_open = _of_groups(pair[0], num_groups), _of_groups(pair[1], num_groups)
                is_tie_T[token] |= _is_tie(*scores, pair, pair_open)
    return is_tie_T


def _router_output(
    operation: str, layer: int, sides: tuple[_PartsOfSide, _PartsOfSide]
) -> FloatArray | None:
    """[T, E or groups]: of the first side that has it."""
    for side in sides:
        if parts := side.parts(layer, operation):
            return sum_of_parts(parts, shape_of(parts))
    return None


def _moved_scores(
    layer: int,
    sides: tuple[_PartsOfSide, _PartsOfSide],
    scores_TE: FloatArray,
    tolerance: Tolerance,
) -> FloatArray:
    """[T, E]: by how much each score may differ between the sides.

    By what the logits differ, which are compared themselves, and half a spacing of the scores' own type. Where a side
    has no logits: what rounding explains of a token's scores.
    """
    pair = [side.parts(layer, ROUTER_LOGITS) for side in sides]
    if not all(pair):
        rms_T1 = np.sqrt(np.nanmean(scores_TE.astype(np.float64) ** 2, axis=1, keepdims=True))
        return (tolerance.rms * (rms_T1 + np.abs(scores_TE))).astype(np.float32)
    # sigmoids and softmax are of two-byte numbers at the coarsest, also where weights are quantised
    spacing = min(SPACING[tolerance.dtype], SPACING["bfloat16"])
    num_tokens, num_experts = scores_TE.shape
    shape = max(shape_of(*pair)[0], num_tokens), num_experts
    a_TE, b_TE = (sum_of_parts(of, shape)[:num_tokens].astype(np.float64) for of in pair)
    if not np.allclose(a_TE, scores_TE, rtol=1e-3, atol=1e-3, equal_nan=True):
        a_TE, b_TE = ((1 + np.tanh(logits_TE / 2)) / 2 for logits_TE in (a_TE, b_TE))
    return (np.abs(a_TE - b_TE) + spacing / 2 * np.abs(a_TE)).astype(np.float32)


def _is_tie(
    scores_E: FloatArray,
    moved_E: FloatArray,
    pair: tuple[BoolArray, BoolArray],
    pair_open: tuple[BoolArray, BoolArray] | None,
) -> bool:
    """Whether no side passed over an expert whose score is higher by more than it may have moved.

    pair_open: the experts [E] of the groups that each side took, which alone it can have passed over; None: all.
    """
    ours_E = pair[0] & ~pair[1]
    theirs_E = pair[1] & ~pair[0]
    gaps = scores_E[ours_E][:, None] - scores_E[theirs_E]
    moved = moved_E[ours_E][:, None] + moved_E[theirs_E]
    are_theirs_wrong = ~(gaps <= moved)
    are_ours_wrong = ~(gaps >= -moved)
    if pair_open:
        are_theirs_wrong &= pair_open[1][ours_E][:, None]
        are_ours_wrong &= pair_open[0][theirs_E]
    return not (are_theirs_wrong | are_ours_wrong).any()


def _is_group_tie(
    scores_G: FloatArray, moved_E: FloatArray, pair: tuple[BoolArray, BoolArray]
) -> bool:
    """Whether a group that one side alone took is as near to one that it left as their scores may have moved."""
    num_groups = len(scores_G)
    # the score of a group is the sum of its two best experts'
    moved_G = 2 * moved_E.reshape(num_groups, -1).max(1)
    ours_G, theirs_G = (_any_feature(chosen_E.reshape(num_groups, -1)) for chosen_E in pair)
    near_GG = np.abs(scores_G[:, None] - scores_G) <= moved_G[:, None] + moved_G
    swaps = ((ours_G & ~theirs_G, ~ours_G), (theirs_G & ~ours_G, ~theirs_G))
    return any(bool(near_GG[np.ix_(taken_G, left_G)].any()) for taken_G, left_G in swaps)


def _of_groups(chosen_E: BoolArray, num_groups: int) -> BoolArray:
    """[E]: the experts of the groups of which some expert was chosen."""
    of_groups = chosen_E.reshape(num_groups, -1)
    return np.repeat(_any_feature(of_groups), of_groups.shape[1])


def _with_experts(
    difference: Difference,
    pair: Pair,
    sides: tuple[_PartsOfSide, _PartsOfSide],
    tolerance: Tolerance,
) -> Difference:
    """With the experts whose tokens alone differ, where there are any: every token of theirs, and no other token."""
    choices = sides[1].parts(difference.layer, ROUTER_CHOICES)
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


def _rms_of_tokens(values_TF: FloatArray) -> FloatArray:
    """[T]: over the features that are known; 0 of a token without any."""
    is_known_TF = np.isfinite(values_TF)
    squares_T = np.where(is_known_TF, values_TF, 0.0).astype(np.float64) ** 2
    return np.sqrt(squares_T.sum(1) / np.maximum(is_known_TF.sum(1), 1)).astype(np.float32)


def _rms(values: FloatArray) -> float:
    known = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(known**2))) if known.size else 0.0
