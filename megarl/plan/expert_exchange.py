"""How many copies of its tokens a training rank sends to experts, over which kind of link, by dispatcher. Pure.

The router is taken to choose evenly: first groups of experts, then experts among theirs (DeepSeek-V3, section 2.1.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from megarl.device import DEEPEP_NODE_RANKS
from megarl.model.hf_config import HfFacts
from megarl.model.shape import ModelShape
from megarl.placement.flex_dispatcher import GROUP_SIZES
from megarl.placement.train_layout import TrainLayout

ACTIVATION_BYTES = 2  # of a number between layers


@dataclass(frozen=True)
class EvenRouting:
    """A router that picks `top_groups` of the equal groups evenly, and then `chosen` of the experts in them."""

    experts: int
    chosen: int
    groups: int = 1
    top_groups: int = 1


@cache
def chance_of_none(routing: EvenRouting, parts: int) -> float:
    """The chance that none of a token's experts is in a given one of so many equal parts of all experts.

    j of the part's groups are among the chosen ones with the chance of a hypergeometric draw; then all chosen
    experts are among those of the chosen groups that are not in the part. Where parts and groups do
    not divide each other, groups are ignored.
    """
    groups = routing.groups
    top_groups = routing.top_groups
    if groups % parts and parts % groups:
        groups = top_groups = 1
    of_group = routing.experts // groups
    touched = max(1, groups // parts)
    shared = min(of_group, routing.experts // parts)
    in_reach = top_groups * of_group
    return sum(
        math.comb(touched, j)
        * math.comb(groups - touched, top_groups - j)
        / math.comb(groups, top_groups)
        * math.comb(in_reach - j * shared, routing.chosen)
        / math.comb(in_reach, routing.chosen)
        for j in range(min(touched, top_groups) + 1)
    )


def routing_of(shape: ModelShape, facts: HfFacts | None) -> EvenRouting:
    """The router of a model; without facts, one of a single group."""
    groups = (facts.num_groups if facts else None) or 1
    top_groups = (facts.top_groups if facts else None) or groups
    return EvenRouting(shape.num_experts, shape.experts_per_token, groups, top_groups)


@dataclass(frozen=True)
class TokenCopies:
    """The mean number of copies that leave a GPU for each of its tokens, one way.

    fabric: to other nodes. nvlink: inside a node, at the same time; with DeepEP those that it passes on for others,
    too. gathered: afterwards, among the ranks that split an expert.
    """

    fabric: float
    nvlink: float
    gathered: float = 0.0


def by_alltoall(routing: EvenRouting, layout: TrainLayout, gpus_per_node: int) -> TokenCopies:
    """A copy to each chosen expert on another rank; ranks that split an expert gather each other's copies."""
    nodes = min(layout.ep, math.ceil(layout.ep * layout.etp / gpus_per_node))
    return TokenCopies(
        fabric=routing.chosen * (1 - 1 / nodes),
        nvlink=routing.chosen * (1 / nodes - 1 / layout.ep),
        gathered=routing.chosen * (layout.etp - 1),
    )


def by_deepep(routing: EvenRouting, layout: TrainLayout, gpus_per_node: int) -> TokenCopies:
    """A copy to each other node with a chosen expert, and in each node one to each rank but that where it landed.

    All ranks that split an expert get a copy, and gather nothing. DeepEP counts nodes by its own size, not by
    gpus_per_node.
    """
    ranks = layout.ep * layout.etp
    nodes = ranks // min(ranks, DEEPEP_NODE_RANKS)
    return TokenCopies(
        fabric=(nodes - 1) * (1 - chance_of_none(routing, min(nodes, layout.ep))),
        nvlink=(ranks - nodes) * (1 - chance_of_none(routing, layout.ep)),
    )


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a GPU sends, by kind of link."""

    nvlink_bytes: float
    fabric_bytes: float


def exchanged_bytes(
    shape: ModelShape, facts: HfFacts | None, layout: TrainLayout, gpus_per_node: int, tokens: float
) -> dict[str, LinkBytes]:
    """What a GPU sends to experts and back in a forward pass, by dispatcher.

    flex only where DeepEP has settings for so many ranks. Empty without experts, or with all of them on one rank.
    tokens: of a data-parallel rank, through the layers with experts of a mean pipeline stage.
    """
    ranks = layout.ep * layout.etp
    if not shape.num_experts or ranks == 1:
        return {}
    dispatchers = {"alltoall": by_alltoall}
    if ranks in GROUP_SIZES and gpus_per_node % min(ranks, DEEPEP_NODE_RANKS) == 0:
        dispatchers["flex"] = by_deepep
    sparse = shape.num_sparse_layers / layout.pp
    rows = 2 * sparse * tokens / (layout.cp * layout.tp)
    each = rows * shape.hidden_size * ACTIVATION_BYTES
    sent: dict[str, LinkBytes] = {}
    for name, by in dispatchers.items():
        copies = by(routing_of(shape, facts), layout, gpus_per_node)
        inside = copies.nvlink + copies.gathered
        sent[name] = LinkBytes(inside * each, copies.fabric * each)
    return sent
