"""Which experts each token goes to: chosen by the router, or replayed; and what an unbalanced choice costs.

Megatron's own auxiliary losses are means over whatever tokens a micro-batch happens to hold, so that they change with
packing and layout (and 0.16.1 weakens them under TP and CP). Here the balance is each sequence's own (DeepSeek-V3,
arXiv 2412.19437, eq. 17-20), weighted by its tokens: the same whatever row or rank a sequence is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.sequences import PackedRow

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Choices:
    """The experts of one micro-batch's tokens on this rank: noted while `is_noting`, else replayed.

    experts: layer (from 0) -> [tokens of this rank, experts per token]; -1 where the router chooses for itself.
    """

    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    is_noting: bool = False


def engine_choices(row: PackedRow, layers: Sequence[int], tp_rank: int, tp: int) -> Choices:
    """What the engine chose, for the MoE layers that the row's experts_LMK are of, on one tensor-parallel rank."""
    assert row.experts_LMK is not None
    size = len(row.experts_LMK) // tp
    mine = row.experts_LMK[tp_rank * size : (tp_rank + 1) * size]
    return Choices({layer: mine[:, index] for index, layer in enumerate(layers)})


@dataclass
class Routing:
    """What all routers of one training rank share: the micro-batch that passes, and the sums over a pass.

    balance_scale and z_scale turn the two sums into addends of the loss sum. Sums are this rank's tokens' own.
    """

    balance_scale: float = 0.0
    z_scale: float = 0.0
    is_training: bool = False
    row: PackedRow | None = None
    choices: Choices | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def start(self, *, is_training: bool, balance_scale: float = 0.0, z_scale: float = 0.0) -> None:
        """Begin a pass over micro-batches."""
        self.is_training, self.balance_scale, self.z_scale = is_training, balance_scale, z_scale
        self.sums = {}

    @contextmanager
    def passing(self, row: PackedRow, choices: Choices | None) -> Iterator[None]:
        """A micro-batch's forward pass; outside of it routers only run to recompute one."""
        self.row, self.choices = row, choices
        try:
            yield
        finally:
            self.row = self.choices = None

    def count(self, name: str, value: torch.Tensor) -> None:
        """Add to a sum of this pass."""
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass(frozen=True)
class _Tokens:
    """This rank's N tokens of a micro-batch as a router sees them; replayed: their experts, -1 if not known."""

    sequence_N: torch.Tensor
    lengths_S: torch.Tensor  # of every sequence, and 1 for the padding
    replayed_NK: torch.Tensor | None

    @property
    def is_real_N(self) -> torch.Tensor:
        return self.sequence_N < len(self.lengths_S) - 1


class Router(TopKRouter):
    """Megatron's router with a balance loss of sequences, padding that counts nowhere, and choices to replay.

    `routing` is the rank's own. A router that Megatron runs again in the backward pass, to recompute, gets back what it
    saw, in the order of the forward passes.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, routing: Routing
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._shared = routing
        # Megatron's hook for replay; not the router itself, which would then be a submodule of its own.
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)  # type: ignore[assignment]
        self._to_recompute: deque[_Tokens] = deque()
        self._tokens: _Tokens

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(probabilities, choice), both [n, experts]."""
        self._tokens = self._see(len(logits))
        probs, choice = super().routing(logits)
        shared = self._shared
        if shared.is_training and torch.is_grad_enabled() and (shared.balance_scale or shared.z_scale):
            probs = MoEAuxLossAutoScaler.apply(probs, self._cost(logits.flatten(0, 1)))
        return probs, choice

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, indices) [n, topk] of the experts to go to."""
        values_NK, own_NK = choose(scores, topk, num_groups, group_topk)
        replayed_NK, shared = self._tokens.replayed_NK, self._shared
        if shared.choices is not None and shared.choices.is_noting:
            shared.choices.experts[self._layer] = own_NK
        if replayed_NK is None:
            return values_NK, own_NK
        is_known_N1 = replayed_NK[:, :1] >= 0
        chosen_NK = torch.where(is_known_N1, replayed_NK, own_NK)
        if shared.row is not None:
            differs_N = (chosen_NK.sort(-1)[0] != own_NK.sort(-1)[0]).any(-1) & self._tokens.is_real_N
            shared.count("differing_choices", differs_N.sum())
            shared.count("replayed_choices", (is_known_N1[:, 0] & self._tokens.is_real_N).sum())
        return scores.gather(1, chosen_NK), chosen_NK

    @property
    def _layer(self) -> int:
        return self.layer_number - 1  # type: ignore[operator]

    def _see(self, num_tokens: int) -> _Tokens:
        """The tokens of the micro-batch that passes, or of the one that is recomputed."""
        row = self._shared.row
        if row is None:
            return self._to_recompute.popleft()
        start = self.tp_group.rank() * num_tokens  # sequence parallelism: each TP rank has its part of the share
        choices = self._shared.choices
        replayed = choices.experts.get(self._layer) if choices is not None and not choices.is_noting else None
        tokens = _Tokens(row.sequence_L[start : start + num_tokens], row.lengths_S, replayed)
        if self._shared.is_training and not torch.is_grad_enabled():
            self._to_recompute.append(tokens)
        return tokens

    def _cost(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """Addends of the loss sum for these tokens.

        A sequence's balance is (E / K) sum_e f_e P_e, f_e the share of its choices and P_e the mean of its normalised
        scores of expert e. f has no gradient, so that each rank adds what its own tokens' scores bring.
        """
        chosen_NE, scores_NE = compute_routing_scores_for_aux_loss(logits_NE, self.topk, self.score_function)
        tokens = self._tokens
        counts_SE = logits_NE.new_zeros(len(tokens.lengths_S), logits_NE.shape[1], dtype=torch.float32)
        counts_SE.index_add_(0, tokens.sequence_N, chosen_NE.float())
        if self.tp_cp_group.size() > 1:  # the ranks among which a sequence is split
            dist.all_reduce(counts_SE, group=self.tp_cp_group)
        share_SE = counts_SE * (logits_NE.shape[1] / self.topk) / tokens.lengths_S[:, None]
        balance_N = (scores_NE * share_SE[tokens.sequence_N]).sum(-1)
        z_N = torch.logsumexp(logits_NE.float(), -1) ** 2
        balance, z = (torch.where(tokens.is_real_N, one, 0.0).sum() for one in (balance_N, z_N))
        self._shared.count("aux_loss", balance)
        self._shared.count("z_loss", z)
        return balance * self._shared.balance_scale + z * self._shared.z_scale

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of each expert, from which router biases are updated; nothing is counted twice."""
        if self.enable_expert_bias and self._shared.is_training and torch.is_grad_enabled():
            with torch.no_grad():
                real_NE = routing_map & self._tokens.is_real_N[:, None]  # indexing would wait for the device
                self.local_tokens_per_expert += real_NE.sum(dim=0)  # type: ignore[operator]


def router_class(routing: Routing) -> Callable[..., Any]:
    """What goes into a layer spec in the place of Megatron's router class."""

    def build(config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> Router:
        return Router(config, pg_collection, routing=routing)

    return build
