"""A stand-in for DeepEP's `Buffer`, over gloo: what goes to whom, as in github.com/deepseek-ai/DeepEP.

A token goes once to each node that has one of its experts, to the rank there with the sender's own place in its node,
which forwards it once to each rank that has one. On the way back the sums are made in the same two steps. Megatron's
flex dispatcher runs above it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.device import DEEPEP_NODE_RANKS


@dataclass
class Sent:
    """Copies of tokens that this rank has sent by dispatches, to itself not counted."""

    over_network: int = 0
    over_nvlink: int = 0


@dataclass(frozen=True)
class _Hop:
    """One of the two steps of a token: the rows that this rank sends, by receiver, and how many it gets from each."""

    rows: Tensor
    to_ranks: Sequence[int]
    from_ranks: Sequence[int]
    num_rows: int  # that this rank has before the step
    group: dist.ProcessGroup

    def there(self, values: Tensor) -> Tensor:
        return _exchanged(values[self.rows], self.to_ranks, self.from_ranks, self.group)

    def back(self, values: Tensor) -> Tensor:
        """The sum over the copies of each row, made in float32."""
        copies = _exchanged(values, self.from_ranks, self.to_ranks, self.group)
        total = copies.new_zeros(self.num_rows, *values.shape[1:], dtype=torch.float32)
        return total.index_add_(0, self.rows, copies.float()).to(values.dtype)


def _exchanged(
    values: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received = values.new_empty(sum(from_ranks), *values.shape[1:])
    dist.all_to_all_single(received, values.contiguous(), [*from_ranks], [*to_ranks], group=group)
    return received


def _hop(is_sent_NR: Tensor, group: dist.ProcessGroup) -> _Hop:
    """The step that sends row n to each rank r for which is_sent_NR [rows, ranks of the group] is set."""
    to_ranks = is_sent_NR.sum(0)
    from_ranks = torch.empty_like(to_ranks)
    dist.all_to_all_single(from_ranks, to_ranks, group=group)
    rows = is_sent_NR.T.nonzero()[:, 1]
    return _Hop(rows, to_ranks.tolist(), from_ranks.tolist(), len(is_sent_NR), group)


class EventOverlap:
    """What has happened when the call returns."""

    def __init__(self, event: object = None) -> None: ...
    def current_stream_wait(self) -> None: ...


class Buffer:
    """The calls that Megatron's fused_a2a.py makes. ranks_per_node: neighbours of a group that count as a node."""

    ranks_per_node: ClassVar[int] = DEEPEP_NODE_RANKS
    sent: ClassVar[Sent] = Sent()

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None: ...

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **_: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, EventOverlap]:
        """(tokens to each rank, to each node, to each expert, whether token n goes to rank r [N, ranks], event)."""
        assert topk_idx.dtype == torch.int64, "DeepEP takes indices of experts in int64"
        ranks = self.group.size()
        assert num_experts % ranks == 0
        is_chosen_NE = topk_idx.new_zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        is_chosen_NE.scatter_(1, topk_idx % (num_experts + 1), True)  # -1, no expert, is the last
        is_chosen_NE = is_chosen_NE[:, :-1]
        is_sent_NR = is_chosen_NE.unflatten(1, (ranks, -1)).any(-1)
        is_sent_ND = self._by_node(is_sent_NR).any(-1)
        counts = [
            is_set.sum(0, dtype=torch.int32) for is_set in (is_sent_NR, is_sent_ND, is_chosen_NE)
        ]
        return *counts, is_sent_NR, EventOverlap()  # type: ignore[return-value]

    def _by_node(self, of_ranks_NR: Tensor) -> Tensor:
        """[N, ranks] -> [N, nodes, ranks of a node]."""
        return of_ranks_NR.unflatten(1, (-1, min(self.ranks_per_node, self.group.size())))

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[_Hop, _Hop] | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: object,
    ) -> tuple[Any, ...]:
        """(tokens, their experts here with -1 for those elsewhere, weights, tokens of each expert, handle, event).

        With the handle of an earlier call the same tokens go the same way, without experts and weights.
        """
        assert x.dim() == 2 and x.is_contiguous()
        if handle is not None:
            return self._sent_on(x, handle), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32, "DeepEP takes weights in float32"
        handle = self._hops(is_token_in_rank)
        received = self._sent_on(x, handle)
        experts = len(num_tokens_per_expert) // self.group.size()
        idx_NK = self._sent_on(topk_idx, handle, counted=False) - self.group.rank() * experts
        is_here_NK = (idx_NK >= 0) & (idx_NK < experts)
        idx_NK = torch.where(is_here_NK, idx_NK, -1)
        weights_NK = self._sent_on(topk_weights, handle, counted=False)
        weights_NK = torch.where(is_here_NK, weights_NK, 0.0)
        counts = torch.bincount(idx_NK[is_here_NK], minlength=experts).tolist()
        return received, idx_NK, weights_NK, counts, handle, EventOverlap()

    def _hops(self, is_sent_NR: Tensor) -> tuple[_Hop, _Hop]:
        """The step of N tokens to other nodes, and the step of the M copies that have landed here to this node's ranks.

        D nodes have P places each. The first step ends at the place in each node that the sender has in its own.
        """
        is_sent_NDP = self._by_node(is_sent_NR)
        is_for_node_ND = is_sent_NDP.any(-1)
        num_nodes, num_places = is_sent_NDP.shape[1:]
        own_node, own_place = divmod(self.group.rank(), num_places)

        to_own_place_NDP = torch.zeros_like(is_sent_NDP)
        to_own_place_NDP[:, :, own_place] = is_for_node_ND
        first = _hop(to_own_place_NDP.flatten(1), self.group)

        # A copy brings along which places of its node want it. Copies are sent in the order of the nodes, as here.
        nodes, tokens = is_for_node_ND.T.nonzero(as_tuple=True)
        wanted = is_sent_NDP[tokens, nodes].byte()
        wanted_MP = _exchanged(wanted, first.to_ranks, first.from_ranks, self.group).bool()

        to_neighbours_MDP = wanted_MP.new_zeros(len(wanted_MP), num_nodes, num_places)
        to_neighbours_MDP[:, own_node] = wanted_MP
        second = _hop(to_neighbours_MDP.flatten(1), self.group)
        return first, second

    def _sent_on(self, values: Tensor, hops: tuple[_Hop, _Hop], *, counted: bool = True) -> Tensor:
        first, second = hops
        if counted:
            own = self.group.rank()
            self.sent.over_network += sum(first.to_ranks) - first.to_ranks[own]
            self.sent.over_nvlink += sum(second.to_ranks) - second.to_ranks[own]
        return second.there(first.there(values))

    def combine(
        self,
        x: Tensor,
        handle: tuple[_Hop, _Hop],
        topk_weights: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """(sum over its ranks of each token that was dispatched, the same of the weights, event)."""
        first, second = handle
        weights = None
        if topk_weights is not None:
            weights = first.back(second.back(topk_weights))
        return first.back(second.back(x)), weights, EventOverlap()


def stand_in_modules() -> dict[str, ModuleType]:
    """What `from deep_ep import ...` finds, by name."""
    package = ModuleType("deep_ep")
    utils = ModuleType("deep_ep.utils")
    package.__dict__.update(Buffer=Buffer, utils=utils)
    utils.__dict__.update(EventHandle=object, EventOverlap=EventOverlap)
    return {"deep_ep": package, "deep_ep.utils": utils}
