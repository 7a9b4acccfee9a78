"""The bench of adapters: one small run has the figures that it promises."""

from __future__ import annotations

import pytest

from tests.scripts.bench.benches import figures

Row = dict[str, float]


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_three_contenders_on_two_ranks() -> None:
    small = "--steps 2 --samples 6 --longest 64 --layers 2 --rank 4"
    rows = figures("lora", f"{small} --gpus 2 --ep 2")
    assert list(rows) == ["full", "merged", "adapters"]
    assert all(row["tokens_per_s"] > 0 and row["exchange_s"] > 0 for row in rows.values())
    assert rows["merged"]["merge_s"] > 0 == rows["full"]["merge_s"] == rows["adapters"]["merge_s"]
    _check_memory(**rows)
    _check_exchanges(**rows)


def _check_memory(full: Row, merged: Row, adapters: Row) -> None:
    assert full["weights_bytes"] == merged["weights_bytes"] == adapters["weights_bytes"]
    assert full["factors_bytes"] == 0 < merged["factors_bytes"] == adapters["factors_bytes"]
    assert (
        full["frozen_bytes"]
        == adapters["frozen_bytes"]
        == 0
        < merged["frozen_bytes"]
        < full["weights_bytes"]
    )
    trained = adapters["factors_bytes"] / 2  # elements of bfloat16
    # in float32: a gradient on each rank, on one of both a weight and two moments
    for row in (merged, adapters):
        assert 4 * trained <= row["grads_bytes"] < 5 * trained
        assert 6 * trained <= row["optimizer_bytes"] <= 12 * trained
    assert adapters["optimizer_bytes"] < full["optimizer_bytes"] / 5
    for row in (full, merged, adapters):
        held = sum(
            row[key]
            for key in row
            if key.endswith(("weights_bytes", "frozen_bytes", "grads_bytes"))
        )
        of_a_rank = (held + row["optimizer_bytes"] + row["factors_bytes"]) / 2
        assert row["peak_bytes"] > row["imports_bytes"] + of_a_rank, "what a rank holds is resident"


def _check_exchanges(full: Row, merged: Row, adapters: Row) -> None:
    """Each of two engines has all weights: a rank has the experts of the other sent, and copies its own."""
    assert (
        full["wire_bytes"]
        == merged["wire_bytes"]
        == full["first_wire_bytes"]
        == merged["first_wire_bytes"]
        > 0
    )
    assert full["wire_bytes"] + full["local_bytes"] > full["weights_bytes"]
    assert adapters["first_wire_bytes"] == full["wire_bytes"] + adapters["wire_bytes"], (
        "the frozen weights once"
    )
    assert (
        0
        < adapters["wire_bytes"] + adapters["local_bytes"]
        < (full["wire_bytes"] + full["local_bytes"]) / 5
    )
    for row in (full, merged, adapters):
        assert row["wire_bytes"] <= row["socket_bytes"] < row["wire_bytes"] * 1.01 + 10_000, (
            "as the kernel counts it"
        )
