"""Which replica sends, by way of whom, on small worlds that can be followed by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.routes import RouteChooser, Transfer
from megarl.resharding.shards import LayoutError, Part, Shard
from megarl.resharding.traffic import count_traffic

TENSORS = tuple(Shard(f"t{number}", (0, 10), (0, 10), f"t{number}") for number in range(8))
TENSOR_BYTES = 100 * 2


def transfers(
    sources: list[Part], targets: list[Part], num_members: int, gpus_per_node: int
) -> list[Transfer]:
    router = RouteChooser(
        sources, targets, num_members, gpus_per_node=gpus_per_node, dtype="bfloat16"
    )
    return [transfer for _, of_flow in router.flows() for transfer in of_flow]


def routes(
    holders: tuple[int, ...], wanters: tuple[int, ...], gpus_per_node: int
) -> list[tuple[int, int, bool]]:
    parts = [Part(TENSORS, holders)], [Part(TENSORS, wanters)]
    return [
        (transfer.source, transfer.target, transfer.forwarded)
        for transfer in transfers(*parts, 32, gpus_per_node)
    ]


def test_the_own_slot_comes_first() -> None:
    assert routes((0, 1, 2), (1, 2), 8) == [(1, 1, False), (2, 2, False)] * 8


def test_the_own_node_comes_second() -> None:
    """Nodes of 4: member 5 takes from 4, though 0 and 1 hold it as well."""
    assert routes((0, 1, 4), (5,), 4) == [(4, 5, False)] * 8


def test_replicas_of_a_node_share_the_sending() -> None:
    sends_by_source = Counter(source for source, _, _ in routes((0, 1), (2, 3), 4))
    assert sends_by_source == {0: 8, 1: 8}


def test_one_wanter_takes_from_all_replicas_in_turn() -> None:
    sends_by_source = Counter(source for source, _, _ in routes((0, 1, 2, 3), (8,), 4))
    assert max(sends_by_source.values()) <= 3  # 8 tensors over 4 replicas
    assert len(sends_by_source) == 4


def test_a_slice_enters_a_node_once_and_is_forwarded_there() -> None:
    """Nodes of 4: 8, 9 and 10 want what 0 has. Each tensor enters once, by each of the three about equally often."""
    hops = routes((0,), (8, 9, 10), 4)
    entries = [target for source, target, forwarded in hops if not forwarded]
    assert all(source == 0 for source, _, forwarded in hops if not forwarded)
    assert sorted(Counter(entries).values()) == [2, 3, 3]
    for tensor, entry in enumerate(entries):
        (_, *forwards) = hops[3 * tensor : 3 * tensor + 3]
        assert sorted(forwards) == [
            (entry, member, True) for member in (8, 9, 10) if member != entry
        ]


def test_nodes_keep_their_sender_while_the_load_is_even() -> None:
    """Four nodes take from two replicas: each node from one of them alone, so that there are few streams."""
    pairs = {(source, target) for source, target, _ in routes((0, 1), (8, 16, 24, 28), 4)}
    assert len(pairs) == 4
    assert Counter(source for source, _ in pairs) == {0: 2, 1: 2}


def test_pairs_begin_with_different_replicas() -> None:
    """Eight target parts that want a row each: were every pair to begin with member 0, it would send them all."""
    targets = [Part((TENSORS[0]._replace(rows=(i, i + 1)),), (8 + i,)) for i in range(8)]
    sends_by_source = Counter(
        transfer.source for transfer in transfers([Part(TENSORS[:1], (0, 1, 2, 3))], targets, 16, 4)
    )
    assert sends_by_source == {0: 2, 1: 2, 2: 2, 3: 2}


def test_equal_boxes_of_several_parts_are_replicas() -> None:
    """Tied embeddings: the last stage holds, under another name, what the first one does."""
    first, last = Shard("e", (0, 10), (0, 4), "embedding"), Shard("e", (0, 10), (0, 4), "output")
    planned = transfers(
        [Part((first,), (0,)), Part((last,), (5,))], [Part((first,), (1, 5, 6))], 8, 4
    )
    assert [(transfer.source, transfer.target, transfer.shard.param) for transfer in planned] == [
        (5, 5, "output"),
        (0, 1, "embedding"),
        (5, 6, "output"),
    ]


def test_members_of_a_large_world_share_the_sending() -> None:
    """64 GPUs, 8 replicas of the dense part and 4 of each expert, engines of one node: no NIC has twice its share."""
    shape = ModelShape(8, 64, 8, 4, 8, 1024, 16, 2, 64)
    sources = megatron_map.parts(shape, TrainLayout(64, 2, 4, 4))
    targets = sglang_map.parts(shape, EngineLayout(8, 8, 4))
    traffic = count_traffic(sources, targets, 64, gpus_per_node=8, dtype="bfloat16")
    for table in (traffic.fabric_out, traffic.fabric_in):
        assert table.max() <= 1.25 * table.mean()


@pytest.mark.parametrize(
    ("held", "area"), [([], 0), ([(0, 4)], 20), ([(0, 4), (4, 7)], 50), ([(0, 3), (5, 10)], 40)]
)
def test_what_has_no_source_is_named(held: list[tuple[int, int]], area: int) -> None:
    sources = [
        Part((Shard("t", rows, (0, 10), "p"),), (number,)) for number, rows in enumerate(held)
    ]
    message = f"^t: member 3 wants rows 2:8, columns 0:10, of which the sources hold {area} of 60"
    with pytest.raises(LayoutError, match=message):
        transfers(sources, [Part((Shard("t", (2, 8), (0, 10), "p"),), (3,))], 4, 4)


def test_sources_that_overlap_are_named() -> None:
    a, b = (
        Shard("t", (0, 6), (0, 4), "p", items=(0, 2)),
        Shard("t", (5, 9), (0, 4), "p", items=(1, 3)),
    )
    words = "t: source boxes overlap without being replicas: rows 0:6, columns 0:4 of items 0:2 and rows 5:9"
    with pytest.raises(LayoutError, match=words):
        transfers([Part((a,), (0,)), Part((b,), (1,))], [Part((a,), (2,))], 4, 4)
