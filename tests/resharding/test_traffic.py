"""The traffic of exchanges small enough to add up by hand; test_reshard_plan.py sums that of the plans."""

from __future__ import annotations

from megarl.resharding.shards import Part, Shard
from megarl.resharding.traffic import count_traffic
from tests.resharding.simulated import into_nodes

WHOLE = Shard("t", (0, 10), (0, 4), "t")  # 80 bytes of bfloat16


def test_the_minimum_does_not_count_what_two_parts_of_a_node_want_twice() -> None:
    """A plan may bring a box once for each part that wants it; what had to come in is one box."""
    targets = [Part((WHOLE._replace(param=f"p{member}"),), (member,)) for member in (2, 3, 5)]
    traffic = count_traffic([Part((WHOLE,), (0,))], targets, 6, gpus_per_node=2, dtype="bfloat16")
    assert traffic.minimum_fabric.tolist() == [0, 80, 80]
    assert into_nodes(traffic, 2) == [0, 160, 80]
