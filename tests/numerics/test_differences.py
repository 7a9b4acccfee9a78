"""The first operation that differs, by hand-made parts of small outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.numerics import operations
from megarl.numerics.differences import (
    LARGEST_RMS,
    SPACING,
    Difference,
    compare,
    first_difference,
    left_out,
    unchecked_layers,
)
from megarl.numerics.operations import AFTER_LAYERS, ATTENTION, BEFORE_LAYERS, LAYER, MLP_NORM
from megarl.numerics.parts import OutputPart, Terms, read_parts, write_parts
from megarl.numerics.report import NamedSide, left_out_lines, table_lines, verdict

TOKENS, WIDTH = 12, 16
VALUES_TF = np.random.default_rng(3).normal(size=(TOKENS, WIDTH)).astype(np.float32)


def part(
    values_TF: np.ndarray = VALUES_TF,
    layer: int = 0,
    operation: str = LAYER,
    rank: int = 0,
    tokens: slice = slice(None),
    features: slice = slice(None),
    terms: Terms | None = None,
) -> OutputPart:
    return OutputPart(
        layer,
        operation,
        rank,
        np.arange(len(values_TF))[tokens],
        np.array(values_TF[tokens, features], np.float32),
        features.start or 0,
        terms,
    )


def wrong(factor: float = 1.1, token: int = 7, feature: int = 9) -> np.ndarray:
    values_TF = VALUES_TF.copy()
    values_TF[token, feature] += factor
    return values_TF


def found(
    ours: list[OutputPart], theirs: list[OutputPart], dtype: str = "float32"
) -> Difference | None:
    return first_difference(compare(ours, theirs, dtype))


def test_parts_of_any_split_make_the_same_whole() -> None:
    """By features, by tokens, by both, and as terms of a sum."""
    halves = [
        part(rank=0, tokens=slice(0, None, 2), features=slice(0, 8)),
        part(rank=1, tokens=slice(0, None, 2), features=slice(8, 16)),
        part(rank=2, tokens=slice(1, None, 2)),
    ]
    terms = [
        part(VALUES_TF - 1, rank=0, terms=(0, 1, 2)),
        part(np.ones_like(VALUES_TF), rank=1, terms=(1, 2, 2)),
    ]
    for parts in (halves, terms):
        (difference,) = compare(parts, [part()], "float32")
        assert not difference.differs and difference.num_tokens == TOKENS


def test_the_first_in_the_order_of_computation_is_named() -> None:
    """Whatever the order of the parts; the embedding before the layers, the final norm after them."""
    keys = [
        (AFTER_LAYERS, operations.FINAL_NORM),
        (10, ATTENTION),
        (9, LAYER),
        (9, MLP_NORM),
        (BEFORE_LAYERS, operations.EMBEDDING),
    ]
    ours = [part(layer=layer, operation=operation) for layer, operation in keys]
    for number in range(len(keys)):
        theirs = [
            part(wrong(), *key) if place <= number else part(VALUES_TF, *key)
            for place, key in enumerate(keys)
        ]
        difference = found(ours, theirs)
        assert difference and (difference.layer, difference.operation) == keys[number]
        assert (difference.token, difference.feature) == (7, 9)
        assert difference.num_differing == 1
        assert difference.largest == pytest.approx(1.1 / np.sqrt(np.mean(VALUES_TF**2)), rel=1e-2)


def test_what_one_side_alone_recorded_is_left_out() -> None:
    assert compare([part(operation=ATTENTION)], [part()], "float32") == []
    # a term of the sum is missing
    assert compare([part(terms=(0, 1, 2))], [part()], "float32") == []
    some = part(tokens=slice(0, 5))
    (difference,) = compare([some], [part(wrong())], "float32")
    assert not difference.differs and difference.num_tokens == 5


def test_one_wrong_token_among_thousands_is_found() -> None:
    """None of its elements is wrong by itself, and the mean of all tokens hides it."""
    rng = np.random.default_rng(5)
    ours_TF = rng.normal(size=(4096, 64)).astype(np.float32)
    errors_TF = rng.normal(size=ours_TF.shape).astype(np.float32)
    rounded_TF = ours_TF + errors_TF * SPACING["bfloat16"] / 2
    assert found([part(ours_TF)], [part(rounded_TF)], "bfloat16") is None
    rounded_TF[1234] = ours_TF[1234] + 5 * SPACING["bfloat16"] * rng.choice([-1, 1], size=64)
    difference = found([part(ours_TF)], [part(rounded_TF)], "bfloat16")
    assert difference and (difference.token, difference.num_differing) == (1234, 1)
    assert difference.largest < difference.allowed_largest
    assert difference.rms < difference.allowed_rms
    side = NamedSide("rank", [""], lambda layer, expert: (0,))
    line = verdict([difference], (side, side), [4096])
    assert "in the mean of a token" in line and "most of all token 1234 of sequence 0" in line


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_differs(value: float) -> None:
    for ours, theirs in (([part(wrong(value))], [part()]), ([part()], [part(wrong(value))])):
        difference = found(ours, theirs)
        assert difference and (difference.token, difference.feature) == (7, 9)
        assert np.isinf(difference.largest)
    replicas = [part(wrong(value), rank=0), part(wrong(value), rank=1)]
    difference = found(replicas, [part()])
    assert difference and difference.deviating == ((), ()), "they agree with each other"


def test_ranks_are_those_that_hold_what_differs() -> None:
    theirs = [
        part(wrong(), rank=0, features=slice(0, 8)),
        part(wrong(), rank=1, features=slice(8, 16)),
    ]
    ours = [part(rank=4, tokens=slice(0, 6)), part(rank=5, tokens=slice(6, 12))]
    difference = found(ours, theirs)
    assert difference and difference.ranks == ((5,), (1,))
    assert difference.deviating == ((), ())


def test_a_replica_that_the_others_contradict_is_told() -> None:
    """On either side, whether it comes first or last; the other side says which of two is right."""
    good = [part(rank=0), part(rank=1)]
    for bad in (0, 1):
        odd = list(good)
        odd[bad] = part(wrong(), rank=bad)
        for sides, deviating in (((odd, good), ((bad,), ())), ((good, odd), ((), (bad,)))):
            difference = found(*sides)
            assert difference and difference.deviating == deviating
            assert (difference.token, difference.feature) == (7, 9)


def test_ranks_of_a_sum_are_told_by_its_terms() -> None:
    """In the ranges that both sides have: two of four terms are one of two."""
    quarters = [part(VALUES_TF / 4, rank=rank, terms=(rank, rank + 1, 4)) for rank in range(4)]
    halves = [part(VALUES_TF / 2, rank=rank, terms=(rank, rank + 1, 2)) for rank in range(2)]
    assert found(quarters, halves) is None
    odd = [*quarters[:3], part(VALUES_TF / 4 + wrong() - VALUES_TF, rank=3, terms=(3, 4, 4))]
    difference = found(odd, halves)
    assert difference and difference.ranks == ((2, 3), (1,))
    # the whole beside its terms is not added to them
    assert found([part(), *quarters], halves) is None


@pytest.mark.parametrize("dtype", SPACING)
def test_rounding_alone_is_explained(dtype: str) -> None:
    """Independent errors of operations, each of half a spacing at most; a hundred times as much is not."""
    rng = np.random.default_rng(1)
    ours, theirs, coarse = [], [], []
    errors_TF = np.zeros_like(VALUES_TF)
    for layer in range(16 if dtype == "fp8" else 100):
        steps_TF = rng.uniform(-0.5, 0.5, VALUES_TF.shape) * SPACING[dtype] * np.abs(VALUES_TF)
        errors_TF = errors_TF + steps_TF.astype(np.float32)
        ours.append(part(layer=layer))
        theirs.append(part(VALUES_TF + errors_TF, layer=layer))
        coarse.append(part(VALUES_TF + 100 * errors_TF, layer=layer))
    assert found(ours, theirs, dtype) is None
    assert found(ours, coarse, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_wrong_factor_in_a_deep_layer_is_named(dtype: str, factor: float) -> None:
    """Behind a thousand operations, whose rounding would explain more than the factor if it added up without end."""
    rng = np.random.default_rng(1)
    names = operations.ORDER[:11]

    def rounded(layer: int, operation: str, scale: float = 1.0) -> OutputPart:
        errors_TF = rng.normal(scale=SPACING[dtype] / 3, size=VALUES_TF.shape)
        return part((VALUES_TF * (1 + errors_TF) * scale).astype(np.float32), layer, operation)

    keys = [(layer, name) for layer in range(92) for name in names]
    clean = [rounded(*key) for key in keys]
    ours = [part(VALUES_TF, *key) for key in keys]
    differences = compare(ours, clean, dtype)
    assert first_difference(differences) is None
    layer, name = keys[163 if dtype == "bfloat16" else 5]
    line = verdict(differences, SIDES, [TOKENS])
    hidden = f"rounding could hide an error of {LARGEST_RMS[dtype]} in the mean"
    assert f"from layer {layer}, {name} on {hidden}" in line
    odd = keys.index((89, ATTENTION))
    difference = found(
        ours, [*clean[:odd], rounded(89, ATTENTION, factor), *clean[odd + 1 :]], dtype
    )
    assert difference and (difference.layer, difference.operation) == (89, ATTENTION)


def choices(experts: list[int], num_experts: int = 4) -> np.ndarray:
    return np.eye(num_experts, dtype=np.float32)[experts]


def test_other_experts_are_explained_by_a_tie_alone() -> None:
    scores_TE = np.array([[0.5, 0.5 + 1e-7, -1, 0], [0.5, 0.4, -1, 0]], np.float32)
    scores = part(scores_TE, operation=operations.ROUTER_SCORES)
    ours = [part(choices([1, 0]), operation=operations.ROUTER_CHOICES), scores]
    assert found(ours, [part(choices([0, 0]), operation=operations.ROUTER_CHOICES)]) is None
    difference = found(ours, [part(choices([0, 1]), operation=operations.ROUTER_CHOICES)])
    assert difference and (difference.num_differing, difference.token) == (1, 1)


def test_a_tie_of_groups_explains_experts_of_any_scores() -> None:
    scores = part(np.array([[0.9, 0.1, 0.5, 0.5]], np.float32), operation=operations.ROUTER_SCORES)
    ours = [part(choices([0]), operation=operations.ROUTER_CHOICES), scores]
    theirs = [part(choices([2]), operation=operations.ROUTER_CHOICES)]
    assert found(ours, theirs)
    groups = part(np.array([[1.0, 1.0]], np.float32), operation=operations.ROUTER_GROUPS)
    assert found([*ours, groups], theirs) is None


def routed(logits_TE: np.ndarray, bias_E: np.ndarray, num_groups: int = 1) -> list[OutputPart]:
    """A router that chooses 8 experts by sigmoids with biases, of the better half of the groups."""
    scores_TE = 1 / (1 + np.exp(-logits_TE)) + bias_E
    groups_TG = np.sort(scores_TE.reshape(len(scores_TE), num_groups, -1), -1)[..., -2:].sum(-1)
    num_taken = max(num_groups // 2, 1)
    is_taken_TG = groups_TG >= np.sort(groups_TG, -1)[:, -num_taken, None]
    is_taken_TE = np.repeat(is_taken_TG, scores_TE.shape[1] // num_groups, axis=1)
    best_T8 = np.where(is_taken_TE, scores_TE, -np.inf).argsort(-1)[:, -8:]
    return routed_to(best_T8, logits_TE, scores_TE, groups_TG)


def routed_to(
    experts_TK: np.ndarray, logits_TE: np.ndarray, *scores: np.ndarray
) -> list[OutputPart]:
    chosen_TE = np.zeros_like(logits_TE)
    np.put_along_axis(chosen_TE, experts_TK, 1, 1)
    names = (operations.ROUTER_SCORES, operations.ROUTER_GROUPS)
    return [
        part(logits_TE, operation=operations.ROUTER_LOGITS),
        part(chosen_TE, operation=operations.ROUTER_CHOICES),
        *(part(values, operation=name) for name, values in zip(names, scores, strict=False)),
    ]


@pytest.mark.parametrize("num_groups", [1, 8])
@pytest.mark.parametrize("layer", [0, 30])
def test_choices_are_checked_in_bfloat16(num_groups: int, layer: int) -> None:
    """As deep as may be: ties are explained; the worst experts, and those of an engine without the biases, are not."""
    rng = np.random.default_rng(2)
    logits_TE = rng.normal(size=(256, 128)).astype(np.float32)
    bias_E = rng.normal(scale=0.05, size=128)
    noise_TE = rng.normal(scale=SPACING["bfloat16"], size=logits_TE.shape)
    rounded_TE = (logits_TE + noise_TE).astype(np.float32)
    before = [
        part(layer=number, operation=name) for number in range(layer) for name in operations.ORDER
    ]

    def differs(theirs: list[OutputPart]) -> Difference | None:
        mine = [replace(each, layer=layer) for each in routed(logits_TE, bias_E, num_groups)]
        others = [replace(each, layer=layer) for each in theirs[:2]]  # engines record no scores
        *_, of_choices = compare([*before, *mine], [*before, *others], "bfloat16")
        assert of_choices.operation == operations.ROUTER_CHOICES
        return of_choices if of_choices.differs else None

    tied = routed(rounded_TE, bias_E, num_groups)
    own = routed(logits_TE, bias_E, num_groups)
    assert (tied[1].values_NF != own[1].values_NF).any(1).sum() > 10
    assert differs(tied) is None
    unbiased = differs(routed(rounded_TE, 0 * bias_E, num_groups))
    assert unbiased and unbiased.num_differing > 100
    worst = differs(routed_to(logits_TE.argsort(-1)[:, :8], rounded_TE))
    assert worst and worst.num_differing == 256


def test_experts_are_told_by_their_tokens() -> None:
    chosen = part(
        choices([token % 4 for token in range(TOKENS)]), operation=operations.ROUTER_CHOICES
    )
    values_TF = VALUES_TF.copy()
    values_TF[2::4] *= 1.5
    ours = [part(operation=operations.EXPERTS), chosen]
    theirs = [part(values_TF, operation=operations.EXPERTS), chosen]
    difference = found(ours, theirs)
    assert difference and difference.experts == (2,)
    values_TF[0] *= 1.5  # a token of another expert, whose other tokens agree
    difference = found(ours, [part(values_TF, operation=operations.EXPERTS), chosen])
    assert difference and difference.experts == ()


def test_files_of_parts_read_back(tmp_path: Path) -> None:
    parts = [part(layer=3, rank=2, features=slice(4, 9)), part(terms=(1, 2, 4))]
    write_parts(tmp_path / "parts.npz", parts)
    stored = read_parts(tmp_path / "parts.npz")
    assert compare(stored, [parts[0]], "float32")[0].num_tokens == TOKENS
    for lazy, written in zip(stored, parts, strict=True):
        assert (lazy.end_feature, lazy.is_empty) == (written.end_feature, written.is_empty)
        read = lazy.loaded()
        assert replace(read, values_NF=written.values_NF, tokens_N=written.tokens_N).__dict__ == (
            written.__dict__
        )
        np.testing.assert_array_equal(read.values_NF, written.values_NF)
        np.testing.assert_array_equal(read.tokens_N, written.tokens_N)


SIDES = (
    NamedSide("training rank", ["tp 0", "tp 1"], lambda layer, expert: (expert // 2,)),
    NamedSide("engine rank", ["", ""], lambda layer, expert: (0, 1)),
)


def test_the_verdict_names_layer_operation_rank_and_place() -> None:
    theirs = [part(rank=0), part(rank=1)]
    ours = [part(wrong(), rank=rank, tokens=slice(6 * rank, 6 * rank + 6)) for rank in (0, 1)]
    line = verdict(compare(ours, theirs, "float32"), SIDES, [5, 7])
    assert line.startswith(
        "layer 0, layer output differs: training rank 1 (tp 1) from engine ranks 0, 1; by 1.1 at most"
    )
    assert "1 of 12 tokens, most of all token 2 of sequence 1, feature 9" in line
    odd = [part(rank=0), part(wrong(), rank=1)]
    line = verdict(compare([part()], odd, "float32"), SIDES, [12])
    assert "differs: engine rank 1 from its replicas; by 1.1 at most" in line
    assert "token 7 of sequence 0, feature 9" in line
    assert verdict(compare([part()], theirs, "float32"), SIDES, [12]) == (
        "all operations agree (1); from layer 0, layer output on rounding could hide an error of 6e-07"
        " in the mean and 7e-06 at an element, in units of an output's RMS; before, a smaller one"
    )


def test_what_was_not_compared_is_told() -> None:
    ours = [part(layer=layer, operation=ATTENTION) for layer in (0, 1, 2, 4)]
    theirs = [part(layer=layer) for layer in (0, 1)] + [part(layer=4, operation=ATTENTION)]
    ours += [part(layer=AFTER_LAYERS, operation=operations.FINAL_NORM)]
    ours += [part(layer=1, terms=(0, 1, 2)), part(layer=4, operation=operations.ROUTER_SCORES)]
    differences = compare(ours, theirs, "float32")
    assert left_out_lines(left_out(ours, theirs, differences), SIDES) == [
        "not compared: attention output, layers 0-2: only training ranks have it",
        "not compared: layer output, layer 0: only engine ranks have it",
        "not compared: layer output, layer 1: no token is whole on both sides",
        "not compared: final norm: only training ranks have it",
    ]
    unchecked = unchecked_layers(differences, 5)
    assert unchecked == [0, 1, 2, 3]
    assert verdict(differences, SIDES, [TOKENS], unchecked) == (
        "layers 0-3: nothing was compared; all other operations agree (1)"
    )
    assert unchecked_layers(compare(ours, ours, "float32"), 3) == []


def test_a_row_of_the_table_has_an_operation() -> None:
    theirs = [part(), part(wrong(), layer=1)]
    head, *rows = table_lines(compare([part(), part(layer=1)], theirs, "float32"))
    assert head.split()[:3] == ["layer", "operation", "largest"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert [row.endswith("differs") for row in rows] == [False, True]
