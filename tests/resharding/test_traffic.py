"""The traffic of exchanges small enough to add up by hand; test_reshard_plan.py sums that of the plans."""

from __future__ import annotations

import pytest

from megarl.resharding.shards import LayoutError, Part, Shard
from megarl.resharding.traffic import count_traffic
from tests.resharding.simulated import into_nodes

WHOLE = Shard("t", (0, 10), (0, 4), "t")  # 80 bytes of bfloat16


def test_every_wire_is_counted_at_both_ends() -> None:
    """Nodes of two. 0 holds t; 0, 1, 2 and 3 want it: on the slot, in the node, over the fabric, forwarded."""
    found = count_traffic(
        [Part((WHOLE,), (0,))], [Part((WHOLE,), (0, 1, 2, 3))], 4, gpus_per_node=2, dtype="bfloat16"
    )
    assert found.dest.tolist() == [80, 80, 80, 80]
    assert found.local.tolist() == [80, 0, 0, 0]
    assert found.minimum_wire.tolist() == [0, 80, 80, 80]
    assert found.minimum_fabric.tolist() == [0, 80]
    entry = found.fabric_in.tolist().index(80)
    assert entry in (2, 3)
    assert found.fabric_out.tolist() == [80, 0, 0, 0]
    assert found.node_out.tolist() == [80, 0, *(80 if member == entry else 0 for member in (2, 3))]
    assert found.node_in.tolist() == [0, 80, *(0 if member == entry else 80 for member in (2, 3))]
    assert into_nodes(found, 2) == [0, 80]


def test_the_targets_type_decides_the_bytes() -> None:
    wanted = [
        WHOLE._replace(dtype="float8_e4m3fn"),
        Shard("bias", (0, 3), (0, 1), "b", dtype="float32"),
    ]
    held = Part((WHOLE, Shard("bias", (0, 3), (0, 1), "b")), (0,))
    found = count_traffic([held], [Part(tuple(wanted), (1,))], 2, gpus_per_node=8, dtype="bfloat16")
    assert found.wire_in.tolist() == [0, 40 + 12]
    assert found.wire_out.tolist() == [40 + 12, 0]


def test_the_minimum_does_not_count_what_two_parts_of_a_node_want_twice() -> None:
    """A plan may bring a box once for each part that wants it; what had to come in is one box."""
    wanted = [Part((WHOLE._replace(param=f"p{member}"),), (member,)) for member in (2, 3, 5)]
    found = count_traffic([Part((WHOLE,), (0,))], wanted, 6, gpus_per_node=2, dtype="bfloat16")
    assert found.minimum_fabric.tolist() == [0, 80, 80]
    assert into_nodes(found, 2) == [0, 160, 80]


def test_a_missing_source_is_named() -> None:
    with pytest.raises(LayoutError, match="t: member 1 wants rows 0:10"):
        count_traffic([], [Part((WHOLE,), (1,))], 2, gpus_per_node=2, dtype="bfloat16")
