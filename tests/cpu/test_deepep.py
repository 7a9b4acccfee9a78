"""The stand-in of DeepEP: what is sent to whom, counted from the routing alone, and what comes back."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from megarl.cpu.deepep import Buffer, Sent
from megarl.device import Address, join_store
from tests.parallel.worlds import run_ranks

RANKS, PLACES = 6, 2  # three nodes of two ranks
RANK_EXPERTS, CHOSEN = 4, 4
NODE_EXPERTS = RANK_EXPERTS * PLACES
TOKENS = 40


def chosen_experts(rank: int) -> Tensor:
    """[tokens, chosen] of a rank. The experts of the first ten tokens are on the first node; the last has none."""
    generator = torch.Generator().manual_seed(rank)
    scores_NE = torch.rand(TOKENS + rank, RANKS * RANK_EXPERTS, generator=generator)
    scores_NE[:10, NODE_EXPERTS:] -= 1
    chosen_NK = scores_NE.topk(CHOSEN).indices
    chosen_NK[-1] = -1
    return chosen_NK


def ranks_of(token: Tensor) -> set[int]:
    return {expert // RANK_EXPERTS for expert in token.tolist() if expert >= 0}


def ranks_of_node(node: int) -> set[int]:
    return {*range(node * PLACES, (node + 1) * PLACES)}


def dispatched(rank: int, meet: Address) -> dict[str, Any]:
    """One token's way there and back, of every token of this rank, and what was sent to each rank."""
    store = PrefixStore("deepep", join_store(meet, 60.0))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    chosen_NK = chosen_experts(rank)
    tokens_NH = torch.arange(2 * len(chosen_NK)).reshape(-1, 2).float() + 1000 * rank
    with patch.object(Buffer, "ranks_per_node", PLACES), patch.object(Buffer, "sent", Sent()):
        buffer = Buffer(group)
        _, _, to_experts, is_sent_NR, _ = buffer.get_dispatch_layout(
            chosen_NK, RANKS * RANK_EXPERTS
        )
        arrived, _, _, _, handle, _ = buffer.dispatch(
            tokens_NH,
            topk_idx=chosen_NK,
            topk_weights=torch.ones(chosen_NK.shape),
            is_token_in_rank=is_sent_NR,
            num_tokens_per_expert=to_experts,
        )
        back, _, _ = buffer.combine(arrived, handle)
        sent = Buffer.sent
    return {
        "to nodes": [rows.tolist() for rows in handle[0].rows.split(list(handle[0].to_ranks))],
        "to neighbours": list(handle[1].to_ranks),
        "over network": sent.over_network,
        "over nvlink": sent.over_nvlink,
        "arrived": arrived[:, 0].tolist(),
        "back": torch.equal(back, tokens_NH * is_sent_NR.sum(1, keepdim=True)),
    }


def test_a_token_crosses_once_to_each_node_that_has_one_of_its_experts() -> None:
    """And there once to each rank that has one, from the rank with its sender's place in the node."""
    routings = [chosen_experts(rank) for rank in range(RANKS)]
    reached = [[ranks_of(token) for token in routing] for routing in routings]
    ranks = run_ranks(RANKS, dispatched)
    crossed = chosen_elsewhere = 0
    for rank, result in enumerate(ranks):
        node, place = divmod(rank, PLACES)
        to_nodes = [
            [
                token
                for token, reach in enumerate(reached[rank])
                if other % PLACES == place and reach & ranks_of_node(other // PLACES)
            ]
            for other in range(RANKS)
        ]
        with_own_place = range(place, RANKS, PLACES)
        to_neighbours = [
            sum(other in reach for sender in with_own_place for reach in reached[sender])
            if other // PLACES == node
            else 0
            for other in range(RANKS)
        ]
        assert result["to nodes"] == to_nodes
        assert result["to neighbours"] == to_neighbours
        for other in range(PLACES, RANKS):
            assert min(to_nodes[other], default=10) >= 10, "those of one node go nowhere else"
        assert result["over network"] == sum(map(len, to_nodes)) - len(to_nodes[rank])
        assert result["over nvlink"] == sum(to_neighbours) - to_neighbours[rank]
        arrived = [
            2 * token + 1000 * sender
            for sender in range(RANKS)
            for token, reach in enumerate(reached[sender])
            if rank in reach
        ]
        assert sorted(result["arrived"]) == arrived
        assert result["back"], (
            "each rank's copy comes back once, and none of a token without experts"
        )
        crossed += result["over network"]
        experts = routings[rank][routings[rank] >= 0]
        chosen_elsewhere += int((experts // NODE_EXPERTS != node).sum())
    assert 0 < crossed < chosen_elsewhere, "fewer than a copy for each chosen expert"
