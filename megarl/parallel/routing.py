"""MoE routing: replaying the experts of tokens, and the auxiliary losses of the router.

Megatron's own auxiliary losses are means over the tokens of a micro-batch, so that they change with packing and layout
(and 0.16.1 weakens them under TP and CP). Here the balance loss is computed for each sequence (DeepSeek-V3, arXiv
2412.19437, eq. 17-20) and weighted by its tokens, so that it does not depend on the row or rank of a sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.parallel import groups
from megarl.parallel.packing import PackedRow

Choose = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Choices:
    """The experts of a micro-batch's tokens on this rank: recorded while `is_recording`, else replayed.

    experts: layer (from 0) -> [tokens of this rank, experts per token], int16, because those of all of a step's tokens
    are on the device at once; -1 where the router chooses for itself.
    """

    experts: dict[int, Tensor] = field(default_factory=dict)
    is_recording: bool = False


@dataclass
class Routing:
    """The state that all routers of a training rank share: the current micro-batch, and the statistics of a pass.

    balance_scale and z_scale convert the two losses to the main loss's sum. sums: over this rank's tokens.
    """

    balance_scale: float = 0.0
    z_scale: float = 0.0
    is_training: bool = False
    row: PackedRow | None = None
    choices: Choices | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)

    def start(
        self, *, is_training: bool, balance_scale: float = 0.0, z_scale: float = 0.0
    ) -> dict[str, Tensor]:
        """Begin a pass over micro-batches; returns the sums, which the pass fills."""
        self.is_training = is_training
        self.balance_scale = balance_scale
        self.z_scale = z_scale
        self.sums = {}
        return self.sums

    @contextmanager
    def passing(self, row: PackedRow, choices: Choices | None) -> Iterator[None]:
        """Set the micro-batch of a forward pass; outside the block routers run only for activation recomputation."""
        self.begin(row, choices)
        try:
            yield
        finally:
            self.row = self.choices = None

    def begin(self, row: PackedRow, choices: Choices | None) -> None:
        """Set the micro-batch of the forward passes up to the next one's; no router is computed again meanwhile."""
        self.row = row
        self.choices = choices

    def count(self, name: str, value: Tensor) -> None:
        """Add to a statistic of this pass."""
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


def load_of(layer: int) -> str:
    """The name of the statistic [experts] that counts the tokens of a layer's experts; layers from 0."""
    return f"load/{layer}"


@dataclass(frozen=True)
class _Tokens:
    """The N tokens of a micro-batch that a router sees on this rank."""

    # the number of each token's sequence, or branch of sequences; the last number is the padding's
    sequence_N: Tensor
    lengths_S: Tensor  # of every sequence, and 1 for the padding
    cp: int  # ranks that split the row
    replayed_NK: Tensor | None  # experts to replay, -1 where they are unknown
    has_branch_SB: Tensor | None = None  # of SharedPrefixes, where sequence_N has branches

    @property
    def copies_N(self) -> Tensor:
        """In how many sequences each token is; none for padding. Booleans where no token is in several, else int64."""
        if self.has_branch_SB is None:
            return self.sequence_N < len(self.lengths_S) - 1
        return self.has_branch_SB.sum(0).long()[self.sequence_N]


class Router(TopKRouter):
    """Megatron's router with a balance loss for each sequence, without padding, and with replay of experts.

    routing: the rank's shared state; layer specs have a partial of this class with it. When Megatron runs the router
    again for recomputation in the backward pass, it uses the tokens of the forward passes, in their order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        routing: Routing,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._shared = routing
        # Megatron's hook for replay; a namespace, because the router itself would become its own submodule.
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)  # type: ignore[assignment]
        self._to_recompute: deque[_Tokens] = deque()
        self._tokens: _Tokens

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(probabilities, choice), both [n, experts]."""
        self._tokens = self._see(len(logits))
        probs, choice = super().routing(logits)
        shared = self._shared
        self._count_load(choice)
        if (
            shared.is_training
            and torch.is_grad_enabled()
            and (shared.balance_scale or shared.z_scale)
        ):
            probs = MoEAuxLossAutoScaler.apply(probs, self._cost(logits.flatten(0, 1)))
        return probs, choice

    def _count_load(self, choice_NE: Tensor) -> None:
        """Count the tokens of each expert in an update; recomputation and multi-token prediction are left out."""
        shared = self._shared
        if shared.is_training and shared.row is not None and self.layer < self.config.num_layers:
            with torch.no_grad():
                load_E = (choice_NE * self._tokens.copies_N[:, None]).sum(0)
            shared.count(load_of(self.layer), load_E)

    def _choose(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Choose,
    ) -> tuple[Tensor, Tensor]:
        """(scores, indices) [n, topk] of the experts, replayed where they are known."""
        values_NK, own_NK = choose(scores, topk, num_groups, group_topk)
        replayed_NK = self._tokens.replayed_NK
        shared = self._shared
        choices = shared.choices
        # multi-token prediction is left out, which runs in updates alone
        if choices is not None and choices.is_recording and self.layer < self.config.num_layers:
            replayed_NK = own_NK
            choices.experts[self.layer] = own_NK.to(torch.int16)
        if replayed_NK is None:
            return values_NK, own_NK
        is_known_N1 = replayed_NK[:, :1] >= 0
        chosen_NK = torch.where(is_known_N1, replayed_NK.long(), own_NK)
        if shared.row is not None:
            differs_N = (chosen_NK.sort(-1)[0] != own_NK.sort(-1)[0]).any(-1)
            copies_N = self._tokens.copies_N
            shared.count("differing_choices", (differs_N * copies_N).sum())
            shared.count("replayed_choices", (is_known_N1[:, 0] * copies_N).sum())
        return scores.gather(1, chosen_NK), chosen_NK

    def own_choice(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, choice), both [n, experts], of this router alone, whatever is replayed."""
        shared = self._shared
        replayed = shared.choices
        shared.choices = None
        try:
            logits = self.gating(hidden)
            _, choice = self.routing(logits)
        finally:
            shared.choices = replayed
        return logits.flatten(0, -2), choice

    def choice_scores(self, logits: Tensor) -> Tensor:
        """The scores whose largest are chosen: of softmax the logits, else sigmoids with the router's biases."""
        if self.score_function == "softmax":
            return logits.float()
        scores = torch.sigmoid(logits.float())
        return scores if self.expert_bias is None else scores + self.expert_bias

    @property
    def layer(self) -> int:
        """From 0."""
        return self.layer_number - 1  # type: ignore[operator]

    def _see(self, num_tokens: int) -> _Tokens:
        """The tokens of the current micro-batch, or of the one that is recomputed."""
        row = self._shared.row
        if row is None:
            return self._to_recompute.popleft()
        # sequence parallelism: each TP rank has its part of the share
        start = self.tp_group.rank() * num_tokens
        choices = self._shared.choices
        if choices is not None and not choices.is_recording:
            replayed = choices.experts.get(self.layer)
        else:
            replayed = None
        tokens = _Tokens(
            row.sequence_L[start : start + num_tokens],
            row.lengths_S,
            row.cp,
            replayed,
            row.shared.has_branch_SB if row.shared else None,
        )
        if self._shared.is_training and not torch.is_grad_enabled():
            self._to_recompute.append(tokens)
        return tokens

    def _cost(self, logits_NE: Tensor) -> Tensor:
        """The auxiliary losses of these tokens, in the scale of the loss sum.

        The balance loss of a sequence is (E / K) sum_e f_e P_e, where f_e is the fraction of its choices and P_e the
        mean of its normalised scores of expert e. f has no gradient, so that each rank adds its own tokens' terms.
        """
        chosen_NE, scores_NE = compute_routing_scores_for_aux_loss(
            logits_NE, self.topk, self.score_function
        )
        tokens = self._tokens
        has_branch_SB = tokens.has_branch_SB
        num_parts = len(tokens.lengths_S) if has_branch_SB is None else has_branch_SB.shape[1]
        counts_SE = logits_NE.new_zeros(num_parts, logits_NE.shape[1], dtype=torch.float32)
        counts_SE.index_add_(0, tokens.sequence_N, chosen_NE.float())
        # the ranks among which a sequence is split
        for group in (groups.tp_group(), groups.cp_group(tokens.cp)):
            if group.size() > 1:
                dist.all_reduce(counts_SE, group=group)
        if has_branch_SB is not None:
            counts_SE = has_branch_SB @ counts_SE
        share_SE = counts_SE * (logits_NE.shape[1] / self.topk) / tokens.lengths_S[:, None]
        if has_branch_SB is not None:  # a token of several sequences is in the loss of each
            share_SE = has_branch_SB.T @ share_SE
        copies_N = tokens.copies_N
        balance_N = (scores_NE * share_SE[tokens.sequence_N]).sum(-1)
        z_N = torch.logsumexp(logits_NE.float(), -1) ** 2 * copies_N
        balance, z = (torch.where(copies_N > 0, loss_N, 0.0).sum() for loss_N in (balance_N, z_N))
        self._shared.count("aux_loss", balance)
        self._shared.count("z_loss", z)
        return balance * self._shared.balance_scale + z * self._shared.z_scale

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, for the update of router biases; recomputation does not count again."""
        if self.enable_expert_bias and self._shared.is_training and torch.is_grad_enabled():
            with torch.no_grad():
                # indexing would wait for the device
                real_NE = routing_map * self._tokens.copies_N[:, None]
                self.local_tokens_per_expert += real_NE.sum(dim=0)  # type: ignore[operator]
