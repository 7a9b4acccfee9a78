"""Near names are offered only where they are near."""

from __future__ import annotations

import pytest

from megarl.spelling import edits, near

MEGATRON = ["fp8", "fp4", "moe_permute_fusion", "recompute_num_layers", "recompute_method", "num_layers"]


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


@pytest.mark.parametrize(("a", "b", "count"), [("tp", "pt", 1), ("tp", "tpp", 1), ("abc", "axc", 1), ("", "ab", 2)])
def test_edits(a: str, b: str, count: int) -> None:
    assert edits(a, b) == edits(b, a) == count
