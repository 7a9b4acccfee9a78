"""How long an engine takes for one token of each running sequence: reads, products and exchanges. An estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megarl.config.hardware import Hardware
from megarl.model.families import family_of
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.plan.engine_memory import index_bytes, layers_of, request_bytes, weight_bytes
from megarl.resharding.routes import item_bytes
from megarl.training.flops import forward_flops, indexer_multiply_adds

_ACTIVATION_BYTES = 2  # of a number between layers
# Assumptions, which bring the published figures in tests/plan/test_decode_step.py within a quarter.
ATTENTION_SHARE = 0.6  # of bf16_flops that decoding's attention reaches
LAYER_S = 60e-6  # of a layer's kernels, however small what they compute
STEP_S = 2e-3  # of a step's sampling and scheduling
# Tokens of a step by the number of drafts. Published of DeepSeek's own layer at serving: 1.8 to 1.9 with one draft (Ant
# Group at lmsys.org, 2025-09-26), 2.18 and 2.44 with two and three (lmsys.org, 2025-07-17). Samples at temperature 1
# are harder to guess, so these are a little lower.
ACCEPTED = (1.0, 1.75, 2.1, 2.3)


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decoding step, by what they are spent on; attention with its KV cache; drafts: the draft model."""

    attention: float
    experts: float
    other_weights: float
    exchanges: float
    kernels: float
    drafts: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def all_to_all_s(hardware: Hardware, ep: int, tokens: float) -> float:
    """Seconds of DeepEP's dispatch and combine of so many tokens of each GPU in a layer, as of the nearest EP size."""
    nearest = min(hardware.deepep_token_s, key=lambda size: abs(size - ep))
    return hardware.deepep_latency_s + hardware.deepep_token_s[nearest] * tokens


@dataclass(frozen=True)
class EngineSpeed:
    """One engine's decoding.

    weight_bytes: of all weights on a GPU; kv_bytes: of one token in a GPU's cache. Both with the draft model.
    """

    shape: ModelShape
    layout: EngineLayout
    hardware: Hardware
    gpus_per_node: int
    dtype: str
    weight_bytes: float
    kv_bytes: float

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of the routed experts' weights on a GPU."""
        item = item_bytes(self.dtype)
        shape = self.shape
        if self.layout.fp8:
            layers = max(1, shape.num_sparse_layers)
            plain = min(self.layout.precision.plain_last_layers, layers) / layers
            item = plain * item + (1 - plain)
        experts = shape.num_sparse_layers * shape.num_experts
        return experts * self._expert_size * item / self.layout.tp

    @cached_property
    def other_bytes(self) -> float:
        """Bytes of all other weights on a GPU that a step reads.

        Not a vision tower, not the embedding's table, and of latent attention not kv_b_proj, in whose place are w_kc
        and w_vc.
        """
        shape = self.shape
        mla = shape.mla
        layout = self.layout
        unread = shape.vocab_size * shape.hidden_size * item_bytes(self.dtype) * (not shape.tied)
        if mla:
            of_layer = shape.num_heads * (mla.nope_dim + mla.v_dim) * mla.kv_lora_rank
            plain_layers = layout.precision.plain_last_layers
            if not layout.precision.quantises("kv_b_proj"):
                plain_layers = shape.num_layers
            tiles = (shape.num_layers - plain_layers) * of_layer
            unread += tiles + plain_layers * of_layer * item_bytes(self.dtype)
        wrapper = family_of(shape).wrapper
        tower_bytes = wrapper.tower_params * item_bytes(self.dtype) if wrapper else 0
        draft_bytes = self._draft_bytes if layout.draft else 0.0
        target_bytes = self.weight_bytes - draft_bytes - tower_bytes
        return max(0.0, target_bytes - self.expert_bytes - unread / layout.attention_tp)

    def step_s(self, running: int, context: float) -> float:
        """Seconds of one token for each of `running` sequences of `context` tokens in the mean."""
        return self.step(running, context).total / ACCEPTED[self.layout.draft]

    def step(self, running: int, context: float) -> DecodeStep:
        """A step by part, each the longer of its reads and its products (Williams et al. 2009, the roofline)."""
        of_model = self._forward(running, context, 1 + self.layout.draft)
        if self.layout.draft:
            return replace(of_model, drafts=self._drafts_s(running, context))
        return of_model

    def _forward(self, running: int, context: float, tokens: int) -> DecodeStep:
        """One forward pass over so many new tokens of each sequence; the cache is read once."""
        return DecodeStep(
            attention=self._attention_s(running / self.layout.dp, context, tokens),
            experts=self._experts_s(running * tokens),
            other_weights=self._other_weights_s(running * tokens),
            exchanges=self._exchanges_s(running * tokens),
            kernels=STEP_S + LAYER_S * self.shape.num_layers,
        )

    def _drafts_s(self, running: int, context: float) -> float:
        """Of the draft model: a pass over the verified tokens gives the first draft, one more pass each further draft.

        Each of them is launched and sampled from like a step of the model.
        """
        number = self.layout.draft
        model = self._draft_model
        verified = model._forward(running, context, 1 + number).total
        return verified + (number - 1) * model._forward(running, context, 1).total

    @cached_property
    def _draft_model(self) -> EngineSpeed:
        """One layer with experts, and the embedding and the output layer that it shares."""
        shape = self._draft_shape
        layout = replace(self.layout, draft=0)
        copies = 1 / layout.attention_tp + (not shape.tied) / layout.head_ranks
        shared = shape.vocab_size * shape.hidden_size * item_bytes(self.dtype) * copies
        kv_bytes = self.kv_bytes / layers_of(self.shape, self.layout)
        return replace(
            self,
            shape=shape,
            layout=layout,
            weight_bytes=self._draft_bytes + shared,
            kv_bytes=kv_bytes,
        )

    @cached_property
    def _draft_bytes(self) -> int:
        """Bytes of the draft model's own weights on a GPU."""
        layouts = (replace(self.layout, draft=draft) for draft in (1, 0))
        with_draft, without = (
            max(weight_bytes(self._draft_shape, layout, self.dtype)) for layout in layouts
        )
        return with_draft - without

    @property
    def _draft_shape(self) -> ModelShape:
        return replace(self.shape, num_layers=1, num_dense_layers=0)

    def prefill_s(self, length: int) -> tuple[float, float]:
        """Seconds to read a sequence of `length` tokens: on the GPUs of its attention group, and on all GPUs.

        The experts are on all of the engine's GPUs, and everything else on the group's.
        """
        shape = self.shape
        layout = self.layout
        experts = (
            2.0 * length * shape.num_sparse_layers * shape.experts_per_token * self._expert_size
        )
        of_group = (forward_flops(shape, length) - experts) / (
            layout.attention_tp * self._flops_per_s
        )
        return of_group, experts / (layout.tp * self._flops_per_s)

    @property
    def _flops_per_s(self) -> float:
        card = self.hardware
        peak = card.bf16_flops
        if self.layout.fp8 and card.fp8_flops:
            plain = self.layout.precision.plain_last_layers / self.shape.num_layers
            peak = 1 / (plain / card.bf16_flops + (1 - plain) / card.fp8_flops)
        return peak * card.prefill_share

    @cached_property
    def _token_flops(self) -> float:
        """Of a forward pass over one token."""
        of_indexers = 2.0 * self.shape.num_layers * indexer_multiply_adds(self.shape)[0]
        return forward_flops(self.shape, 1) + of_indexers

    @property
    def _expert_size(self) -> int:
        """Parameters of one expert."""
        return 3 * self.shape.hidden_size * self.shape.moe_ffn_size

    def _attention_s(self, rows: float, context: float, tokens: int) -> float:
        """Of a group's sequences, whose heads its ranks split; latent attention multiplies with the compressed keys.

        An indexer multiplies with a key of its own of each token, whole on every rank, and attention reads the keys
        that it chooses. They count where a sequence has fewer, too: in the simulation steps are linear in the context.
        """
        shape = self.shape
        mla = shape.mla
        seen = context
        of_index = index_flops = 0.0
        if shape.indexer:
            seen = shape.indexer.top_k
            of_index = layers_of(shape, self.layout) * index_bytes(shape)
            per_pair = indexer_multiply_adds(shape)[1]
            index_flops = 2 * rows * tokens * context * shape.num_layers * per_pair
        if mla:
            width = 2 * mla.kv_lora_rank + mla.rope_dim
        else:
            width = 2 * shape.head_dim
        flops = (
            2
            * rows
            * tokens
            * seen
            * (shape.num_layers - shape.num_linear_layers)
            * shape.num_heads
            * width
            / self.layout.attention_tp
        )
        in_products = (flops + index_flops) / (self.hardware.bf16_flops * ATTENTION_SHARE)
        # linear attention reads and writes its states, whatever the context
        cached = (self.kv_bytes - of_index) * seen + of_index * context
        read = rows * (cached + 2 * request_bytes(shape, self.layout))
        return max(read / self.hardware.hbm_reached_per_s, in_products)

    def _experts_s(self, running: int) -> float:
        """Each token chooses its experts evenly and by itself: the share that is read is 1 - (1 - k / E) ^ tokens."""
        shape = self.shape
        if not shape.num_experts:
            return 0.0
        read = self.expert_bytes * (
            1 - (1 - shape.experts_per_token / shape.num_experts) ** running
        )
        chosen = 2 * running * shape.experts_per_token * self._expert_size * shape.num_sparse_layers
        return max(
            read / self.hardware.hbm_reached_per_s, chosen / (self.layout.tp * self._flops_per_s)
        )

    def _other_weights_s(self, running: int) -> float:
        """Of projections, dense layers, shared experts and output layer."""
        shape = self.shape
        layout = self.layout
        shared = 2 * shape.num_sparse_layers * shape.num_shared_experts * self._expert_size
        chosen = 2 * shape.num_sparse_layers * shape.experts_per_token * self._expert_size
        flops = running * (self._token_flops - chosen) / layout.tp
        # each rank computes them for all gathered tokens
        if layout.shared_ranks(shape) == 1 and not layout.deepep:
            flops += running * shared * (1 - 1 / layout.tp)
        return max(self.other_bytes / self.hardware.hbm_reached_per_s, flops / self._flops_per_s)

    def _exchanges_s(self, running: int) -> float:
        """Attention's sums in each group, and what brings tokens to dense layers and experts, and back."""
        shape = self.shape
        layout = self.layout
        seconds = shape.num_layers * self._ring_s(running / layout.dp, layout.attention_tp)
        if not layout.whole_dense:
            seconds += shape.num_dense_layers * self._ring_s(running, layout.tp)
        if layout.deepep:
            # as in the table
            tokens = running / layout.tp * shape.hidden_size / 7168 * shape.experts_per_token / 8
            return seconds + shape.num_sparse_layers * all_to_all_s(
                self.hardware, layout.ep, tokens
            )
        return seconds + shape.num_sparse_layers * self._ring_s(running, layout.tp)

    def _ring_s(self, tokens: float, ranks: int) -> float:
        """Of a sum over ranks, or of gathering tokens and adding up what became of them, as many bytes.

        A ring brings and takes 2 (n - 1) / n of a message; over nodes each GPU has its share of it on the wire.
        """
        card = self.hardware
        if ranks == 1:
            return 0.0
        message = tokens * self.shape.hidden_size * _ACTIVATION_BYTES
        inside = min(ranks, self.gpus_per_node)
        seconds = 2 * (inside - 1) / inside * message / card.nvlink_reached_per_s
        if ranks == inside:
            return card.nvlink_latency_s + seconds
        nodes = ranks // inside
        seconds += 2 * (nodes - 1) / nodes * message / inside / card.nic_reached_per_s
        return card.nic_latency_s + seconds
