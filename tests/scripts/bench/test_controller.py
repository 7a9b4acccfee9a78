"""The controller bench: the bytes that it computes for each node, and one small run of it."""

from __future__ import annotations

import pytest

from megarl.placement.train_layout import TrainLayout
from megarl.training.batching import SampleRef, Update
from scripts.bench.controller import TOKEN_BYTES, node_bytes
from tests.scripts.bench.benches import figures


def test_bytes_of_nodes_by_hand() -> None:
    """16 ranks, TP4 PP2 DP2: node 0 has stage 0 of both, node 1 stage 1. Group 0 is shared, group 1 is the second's."""
    layout = TrainLayout(16, tp=4, pp=2, ep=1)
    first, second = SampleRef(0, 0, 110, 100), SampleRef(0, 1, 60, 50)
    third = SampleRef(1, 0, 40, 30)
    updates = [Update((((first,),), ((second, third),)), 1.0, 210, 180)]
    groups = [TOKEN_BYTES * 150, TOKEN_BYTES * 30]
    whole = sum(groups)
    assert node_bytes("inline", layout, updates, groups) == 2 * whole
    assert node_bytes("everything", layout, updates, groups) == 2 * whole
    assert node_bytes("dealt", layout, updates, groups) == whole + TOKEN_BYTES * (100 + 50 + 30)


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_a_run_counts_what_each_way_sends() -> None:
    options = "--ranks 8 --hosts 2 --groups 8 --updates 2 --everything"
    (rows,) = figures("controller", options).values()
    assigned, inline = rows["dealt"], rows["inline"]
    assert (assigned["calls"], inline["calls"]) == (8 + 2, 8), (
        "one call more for each data-parallel rank"
    )
    assert assigned["references"] == 2 * 8 + 2 * (1 + 8), (
        "two for each rank, and the groups once for each share"
    )
    assert inline["references"] == 8 * 8
    assert assigned["pickled_bytes"] < inline["pickled_bytes"] < rows["everything"]["pickled_bytes"]
    assert rows["sample"]["calls"] > 8 + 1, (
        "one for each group, one for the capacity, others for what finishes"
    )
    assert rows["values"]["references"] < 8 * 8
