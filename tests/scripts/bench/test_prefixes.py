"""The bench of shared prefixes: one run compares equal steps and prints its figures."""

from __future__ import annotations

import pytest

from tests.scripts.bench.benches import figures


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_a_run_on_two_ranks() -> None:
    """The script itself fails where an update's loss or gradient norm is not that of plain rows."""
    sizes = "--prompts 4 --samples-per-prompt 4 --prompt-tokens 32 --response-tokens 8"
    row = figures("prefixes", f"--steps 2 --layers 2 {sizes} --gpus 2 --ep 2")
    assert row["ratio"] > 0
    # of both ranks, each of which has two of the four groups
    assert row["shared_tokens"] == 4 * (32 + 4 * 8)
    assert row["plain_tokens"] == 4 * 4 * (32 + 8)
