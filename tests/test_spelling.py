"""Near names are offered only where they are near."""

from __future__ import annotations

import pytest

from megarl.spelling import did_you_mean, edit_distance, near

MEGATRON = [
    "fp8",
    "fp4",
    "moe_permute_fusion",
    "recompute_num_layers",
    "recompute_method",
    "num_layers",
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("foo", []),
        ("fp88", ["fp8"]),
        ("fp", ["fp8", "fp4"]),
        ("moe_permute_fusio", ["moe_permute_fusion"]),
        ("recompute_layers", ["recompute_num_layers"]),
        ("", []),
        ("a" * 100_000, []),
    ],
)
def test_near_names(name: str, found: list[str]) -> None:
    assert near(name, MEGATRON) == found
    assert near(name, []) == []


@pytest.mark.parametrize(
    ("a", "b", "count"), [("tp", "pt", 1), ("tp", "tpp", 1), ("abc", "axc", 1), ("", "ab", 2)]
)
def test_edit_distance(a: str, b: str, count: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == count


def test_a_suggestion_names_at_most_three() -> None:
    assert did_you_mean(near("fp", MEGATRON), "remove it") == "did you mean fp8 or fp4?"
    assert did_you_mean(["tp", "ep", "pp", "cp"], "remove it") == "did you mean tp or ep or pp?"
    assert did_you_mean([], "remove it") == "remove it"
