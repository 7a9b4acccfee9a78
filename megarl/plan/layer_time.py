"""How long a training rank's layers take besides their products: exchanges, weights and kernel launches. An estimate.

Hidden behind products is only what an option of Megatron's in the recipe hides (`OVERLAPS`). Exchanges grow with the
tokens; each micro-batch adds what it costs however few tokens it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.hardware import Hardware
from megarl.model.shape import ModelShape
from megarl.placement.overlaps import PAIRED_PASSES, SHARED_EXPERTS
from megarl.placement.train_layout import TrainLayout
from megarl.plan.activations import RowSize, in_flight
from megarl.plan.expert_exchange import (
    ACTIVATION_BYTES,
    EvenRouting,
    TokenCopies,
    by_alltoall,
    by_deepep,
    routing_of,
)
from megarl.types import RecomputedPart

_WEIGHT_BYTES = 2
# Assumptions, which bring the published figures in tests/plan/test_layer_time.py within 19 %.
# of a layer's kernels in one forward pass of a micro-batch, however small; backward is twice that
LAYER_S = 1e-3
# of a layer with experts: the host waits before a forward all-to-all for the number of tokens
COUNTS_S = 1.5e-3
# of a layer's kernels, those of a part of it
KERNELS_SHARE: Mapping[RecomputedPart, float] = {
    "core_attn": 0.1,
    "layernorm": 0.1,
    "mla_up_proj": 0.2,
    "mlp": 0.3,
    "moe": 0.6,
    "moe_act": 0.1,
    "shared_experts": 0.2,
}
# Of two things that run side by side, the share of the shorter one that the step does not wait for: both want the
# GPU's multiprocessors and its memory. An assumption: the three configurations that were run with and without
# overlap_moe_expert_parallel_comm (tests/plan/test_layer_time.py) come to 0.4, 0.8 and 1.0.
HIDDEN_SHARE = 0.7
# experts: tokens on their way to experts run under another micro-batch's products (Megatron's combined 1F1B);
# shared_experts: the shared experts' products run under the same exchange of their own layer
Overlap = Literal["experts", "shared_experts"]
OVERLAPS: Mapping[str, Overlap] = {
    PAIRED_PASSES: "experts",
    SHARED_EXPERTS: "shared_experts",
}


def overlaps_of(megatron: Mapping[str, Any]) -> frozenset[Overlap]:
    """What `train.megatron` hides."""
    return frozenset(overlap for option, overlap in OVERLAPS.items() if megatron.get(option))


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of a forward pass on one rank of the mean pipeline stage, by exchange.

    tensor: sums over tensor-parallel ranks; experts: tokens to their experts and back; context: keys and values over
    context-parallel ranks; pipeline: hidden states to the next stage.
    """

    tensor: float
    experts: float
    context: float
    pipeline: float

    def total(self, forwards: int, backwards: int) -> float:
        """Seconds of so many passes. Backward sends as much as forward, and keys and values with their gradients.

        A pass that is recomputed has kept its input, so the stage before sends nothing.
        """
        layers = (forwards + backwards) * (self.tensor + self.experts) + (
            forwards + 2 * backwards
        ) * self.context
        return layers + (1 + backwards) * self.pipeline


@dataclass(frozen=True)
class RankLayers:
    """The layers of one training rank, and what is hidden in them.

    deepep: a token goes once to each rank, not once to each chosen expert. routing: None: as of a router without
    groups of experts.
    ring_shares: as of RankWork; without any all ranks have rows of layout.cp ranks.
    """

    shape: ModelShape
    layout: TrainLayout
    hardware: Hardware
    gpus_per_node: int
    deepep: bool = False
    overlaps: frozenset[Overlap] = frozenset()
    ring_shares: Mapping[int, float] = field(default_factory=dict)
    routing: EvenRouting | None = None

    @property
    def stage_loads(self) -> list[float]:
        """Layers of each pipeline rank over those of the mean one."""
        layout = self.layout
        layers = self.shape.num_layers
        chunks = range(layout.vpp)
        return [
            sum(len(layout.layers(rank, layers, chunk)) for chunk in chunks) * layout.pp / layers
            for rank in range(layout.pp)
        ]

    def exchanges(self, tokens: float) -> ExchangeTime:
        """Seconds of a forward pass over so many tokens of a data-parallel rank; TP cuts dense and shared MLPs, too."""
        layout = self.layout
        layers = self.shape.num_layers / layout.pp
        sparse = self.shape.num_sparse_layers / layout.pp
        row = tokens / layout.cp
        mlps = layers - sparse + sparse * (self.shape.num_shared_experts > 0)
        return ExchangeTime(
            tensor=(layers + mlps) * self._sum_s(row),
            experts=sparse * self._experts_s(row / layout.tp),
            context=layers * self._ring_s(tokens),
            pipeline=self._pipeline_s(row / layout.tp),
        )

    def paired_share(self, micro_batches: float) -> float:
        """Of an update's passes, those that run beside another micro-batch's.

        The first passes forward have no pass back beside them yet, and the last ones back none forward.
        """
        count = max(1, math.ceil(micro_batches))
        alone = sum(in_flight(self.layout, 0, count))
        return 1 - alone / (count * self.layout.vpp)

    def micro_batch_s(
        self, weights_bytes: float, grads_bytes: float, forwards: int, backwards: int
    ) -> float:
        """Seconds of each micro-batch, however few tokens it has. Both bytes are of the whole rank.

        Each pass reads the weights, backward also reads and writes their gradients; the host launches the kernels.
        """
        moved = (forwards + backwards) * weights_bytes + 2 * backwards * grads_bytes
        layers = self.shape.num_layers / self.layout.pp
        sparse = self.shape.num_sparse_layers / self.layout.pp
        launched = layers * (forwards + 2 * backwards) * LAYER_S
        waited = sparse * forwards * COUNTS_S * (not self.deepep)
        return moved / self.hardware.hbm_reached_per_s + launched + waited

    def part_s(self, part: RecomputedPart, tokens: float) -> float:
        """Seconds besides products of a part of each layer, forward, over so many tokens of a data-parallel rank."""
        row = tokens / self.layout.cp
        layers = self.shape.num_layers / self.layout.pp
        sparse = self.shape.num_sparse_layers / self.layout.pp
        shared_s = 0.0
        if self.shape.num_shared_experts:
            shared_s = sparse * self._sum_s(row)
        match part:
            case "core_attn":
                return layers * self._ring_s(tokens)
            case "mlp":
                return (layers - sparse) * self._sum_s(row)
            case "shared_experts":
                return shared_s
            case "moe":
                return sparse * self._experts_s(row / self.layout.tp) + shared_s
            case "layernorm" | "moe_act":
                return self._elementwise_bytes(part, row) / self.hardware.hbm_reached_per_s
        return 0.0

    def _elementwise_bytes(self, part: RecomputedPart, tokens: float) -> float:
        """What a norm or an activation function reads and writes, in all layers of a mean stage."""
        row = RowSize(self.shape, self.layout, tokens, ACTIVATION_BYTES)
        layers = self.shape.num_layers / self.layout.pp
        if part == "layernorm":
            return layers * 2 * row.layer(dense=False)["norm_outputs"]
        experts = row.layer(dense=False)
        sparse = self.shape.num_sparse_layers / self.layout.pp
        return sparse * (experts["experts_fc1"] + experts["experts_act"])

    def part_micro_batch_s(self, part: RecomputedPart) -> float:
        """Of each micro-batch, however few tokens it has: the part's kernels, and for experts their weights."""
        layers = self.shape.num_layers / self.layout.pp
        sparse = self.shape.num_sparse_layers / self.layout.pp
        if part == "mlp":
            num_layers = layers - sparse
        elif part in ("moe", "moe_act", "shared_experts"):
            num_layers = sparse
        else:
            num_layers = layers
        seconds = num_layers * KERNELS_SHARE[part] * LAYER_S
        if part == "moe":
            seconds += self._expert_weights_bytes / self.hardware.hbm_reached_per_s
            seconds += sparse * COUNTS_S * (not self.deepep)
        return seconds

    @property
    def _expert_weights_bytes(self) -> float:
        """Of the routed experts on a rank of the mean stage, whether they are trained or frozen."""
        shape = self.shape
        each = 3 * shape.hidden_size * shape.moe_ffn_size * _WEIGHT_BYTES
        experts = shape.num_experts / (self.layout.ep * self.layout.etp)
        return shape.num_sparse_layers / self.layout.pp * experts * each

    def _bytes(self, tokens: float) -> float:
        return tokens * self.shape.hidden_size * ACTIVATION_BYTES

    def link_per_s(self, ranks: int) -> float:
        """Bytes a second of a GPU's slowest link in a group of so many neighbours."""
        card = self.hardware
        if ranks <= self.gpus_per_node:
            return card.nvlink_reached_per_s
        return card.nic_reached_per_s

    def _sum_s(self, tokens: float) -> float:
        """An all-gather before a product that TP cuts, and a reduce-scatter behind it.

        A ring moves (n - 1) / n of the message for each (Korthikanti et al. 2022, section 4.2).
        """
        tp = self.layout.tp
        return 2 * (tp - 1) / tp * self._bytes(tokens) / self.link_per_s(tp)

    @property
    def copies(self) -> TokenCopies:
        """What a rank sends of each of its tokens to experts."""
        routing = self.routing or routing_of(self.shape, None)
        by = by_deepep if self.deepep else by_alltoall
        return by(routing, self.layout, self.gpus_per_node)

    def _experts_s(self, tokens: float) -> float:
        """Dispatch and combine of a rank's tokens, over both kinds of link at once, and then among ETP's ranks."""
        copies = self.copies
        message = self._bytes(tokens)
        over_fabric = copies.fabric * message / self.hardware.nic_reached_per_s
        over_nvlink = copies.nvlink * message / self.hardware.nvlink_reached_per_s
        gathered = copies.gathered * message / self.link_per_s(self.layout.etp)
        return 2 * (max(over_fabric, over_nvlink) + gathered)

    def _ring_s(self, tokens: float) -> float:
        """Keys and values of the other context-parallel ranks, passed round a ring (Liu et al. 2023)."""
        layout = self.layout
        shape = self.shape
        mla = shape.mla
        width = 2 * max(shape.num_kv_heads, layout.tp) * shape.head_dim
        if mla:
            width = shape.num_heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
        own = tokens / layout.cp * width / layout.tp * ACTIVATION_BYTES
        if shape.delta:
            # linear attention exchanges tokens for heads instead, there and back
            delta = shape.delta
            values = delta.num_value_heads * delta.value_dim
            sent = 2 * (delta.num_key_heads * delta.key_dim + values + delta.num_value_heads)
            share = shape.num_linear_layers / shape.num_layers
            per_rank = sent / layout.cp
            width = (1 - share) * width + share * per_rank
            own = tokens / layout.cp * width / layout.tp * ACTIVATION_BYTES
        shares = self.ring_shares or {layout.cp: 1.0}
        return sum(
            share * (cp - 1) * own / self.link_per_s(layout.tp * cp) for cp, share in shares.items()
        )

    def _pipeline_s(self, tokens: float) -> float:
        """To the next virtual stage; the messages of an interleaved pipeline are not taken to be hidden either."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        return layout.vpp * self._bytes(tokens) / self.link_per_s(layout.world_size)
