"""Activations that a training rank keeps for a micro-batch's backward pass, and the memory of the output layer.

Formulas from the shapes that the layers save: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, carried over to
grouped-query and latent attention, SwiGLU and experts. Read from megatron-core 0.16.1 with TransformerEngine, as it
runs on GPUs: fused attention (no score matrix), norms of their own memory, experts by grouped products, the all-to-all
dispatcher. Nothing here was measured on a GPU.

t: tokens of a row on one context-parallel rank; s = t / TP: of them on one tensor-parallel rank (sequence parallelism);
n: copies of tokens that meet this rank's experts; b: bytes of an element, and c of an input that a linear layer keeps
as fp8 codes for its backward pass: without fp8 b, too. Layers that stay plain among others in fp8 count as these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.model.families import has_output_gate
from megarl.model.shape import ModelShape
from megarl.placement.overlaps import PAIRED_PASSES
from megarl.placement.recomputation import recompute_fields
from megarl.placement.train_layout import TrainLayout
from megarl.plan.fp8_training import CODE_BYTES, Fp8Linears, Module, fp8_linears_of
from megarl.plan.model_size import ModelSize

# assumption: tokens of the fullest rank's experts over the mean; nothing balances RL's choices
EXPERT_IMBALANCE = 1.3
LOGITS_CHUNK_BYTES = 256 << 20  # parallel/logprobs.py: CHUNK_BYTES and KEPT_BYTES on a GPU
LOGITS_CHUNKS = 2.5  # parallel/logprobs.py: a chunk's logits twice, in bfloat16 half once more
# Megatron's recompute_modules -> parts that are then not kept (transformer_config.py)
DROPPED_BY = {
    "core_attn": {"lse", "rule"},
    "mla_up_proj": {"up_projections"},
    "layernorm": {"norm_outputs"},
    "mlp": {"mlp"},
    "moe": {"router", "experts_in", "experts_fc1", "experts_act", "shared"},
    "moe_act": {"experts_act"},
    "shared_experts": {"shared"},
}


@dataclass(frozen=True)
class RowSize:
    """A micro-batch on one rank, and the model's sizes that its memory depends on."""

    shape: ModelShape
    layout: TrainLayout
    tokens: float  # t
    item: int  # b
    fp8: Fp8Linears | None = None

    @property
    def share(self) -> float:
        """s"""
        return self.tokens / self.layout.tp

    @property
    def routed(self) -> float:
        """n: as many copies leave this rank as come in the mean; expert tensor parallelism gathers its peers' too."""
        return self.share * self.shape.experts_per_token * self.layout.etp * EXPERT_IMBALANCE

    @property
    def boundary_bytes(self) -> float:
        """Hidden states between two layers: s h b."""
        return self.share * self.shape.hidden_size * self.item

    def code(self, module: Module) -> float:
        """Bytes of one number of this module's input, as its linear layers keep it: c in the formulas below."""
        if self.fp8 and self.fp8.keeps_codes and self.fp8.has(module):
            return CODE_BYTES
        return self.item

    def apart(self, module: Module) -> float:
        """c of an input that something else keeps as it was: 0 without codes."""
        code = self.code(module)
        return code if code < self.item else 0.0

    def layer(self, dense: bool, linear: bool = False) -> dict[str, float]:
        """Bytes that one layer saves when nothing is recomputed, by part.

        inputs: of the two norms, 2 s h b; their outputs: the same. TransformerEngine fuses the norm before an MLP, and
        that before attention but latent attention, with the product behind it, which keeps the output.
        """
        num_apart = (not dense) + (self.shape.mla is not None)
        hidden = self.share * self.shape.hidden_size
        fused = 0.0 if self.shape.mla else self.code("attention")
        if dense:
            fused += self.code("mlp")
        bytes_by_part = {
            "inputs": 2 * self.boundary_bytes,
            "norm_outputs": num_apart * self.boundary_bytes,
            "fused_norm_outputs": hidden * fused,
        }
        if linear:
            bytes_by_part |= self._linear_attention()
        else:
            bytes_by_part |= self._latent_attention() if self.shape.mla else self._attention()
        if dense:
            return bytes_by_part | {"mlp": self._gated("mlp", self.shape.ffn_size)}
        return bytes_by_part | self._experts()

    def _attention(self) -> dict[str, float]:
        """q, k, v before a norm of each head (if there is one) and behind it: t (heads + 2 kv heads) d b / TP each.

        The result t heads d b / TP, which the output projection reads too; float32 log-sum-exp of each query and head.
        A gate of the result is as large as the queries, and so is what is multiplied with it.
        """
        shape = self.shape
        per_rank = self.tokens / self.layout.tp
        width = shape.head_dim * self.item
        # fewer than ranks: the group is gathered
        kv_heads = max(shape.num_kv_heads, self.layout.tp)
        times = 2 if shape.qk_norm else 1
        heads = times * (shape.num_heads + kv_heads) + kv_heads
        heads += 2 * shape.num_heads * has_output_gate(shape)
        result = per_rank * shape.num_heads * shape.head_dim
        return {
            "qkv": per_rank * heads * width,
            "attention_out": result * (self.item + self.apart("attention")),
            "lse": per_rank * shape.num_heads * 4,
        }

    def _linear_attention(self) -> dict[str, float]:
        """As parallel/delta_net.py saves: with c channels of q, k, v what is projected, c + v + 2 heads, and c again.

        The rule has the convolution's result c, queries and keys in float32 and as repeated for each value head, decay
        and beta in float32, and 64 numbers of each head for the products inside a chunk. The gated norm has its input,
        its gate and two products in float32, and its result.
        """
        delta = self.shape.delta
        assert delta is not None
        per_rank = self.tokens / self.layout.tp
        heads = delta.num_value_heads
        keys = 2 * delta.num_key_heads * delta.key_dim
        values = heads * delta.value_dim
        channels = keys + values
        repeated = 2 * heads * delta.key_dim
        return {
            "projected": per_rank * (2 * channels + values + 2 * heads) * self.item,
            "rule": per_rank
            * ((channels + repeated + 64 * heads) * self.item + (keys + 2 * heads) * 4),
            "gated_norm": per_rank * values * (4 * 4 + self.item),
        }

    def _latent_attention(self) -> dict[str, float]:
        """Compressed queries, keys and values, before and behind their norms: s (2 q_lora + 2 kv_lora + rope) b.

        Behind the up projections, of each head: the query before and behind rotation, 2 (nope + rope), the key put
        together, nope + rope, keys and values as projected, nope + v; then the result, v. An indexer's choice takes
        32 bits for each key.
        """
        mla = self.shape.mla
        assert mla is not None
        key = mla.nope_dim + mla.rope_dim
        heads = self.tokens * self.shape.num_heads / self.layout.tp
        compressed = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        behind_norms = compressed * self.code("mla_up_proj")
        chosen = 4 * self.shape.indexer.top_k if self.shape.indexer else 0
        return {
            "chosen_keys": self.tokens * chosen,
            "compressed": self.share * ((compressed + mla.rope_dim) * self.item + behind_norms),
            "up_projections": heads * (3 * key + mla.nope_dim + mla.v_dim) * self.item,
            "attention_out": heads * mla.v_dim * (self.item + self.apart("attention")),
            "lse": heads * 4,
        }

    def _gated(self, module: Module, width: float) -> float:
        """SwiGLU, not fused: gate and up 2 f, silu(gate) f, the product f, which the second linear layer reads."""
        return self.tokens * width / self.layout.tp * (3 * self.item + self.code(module))

    def _experts(self) -> dict[str, float]:
        """Float32 logits, probabilities and choice of each expert; n copies of h; 2 f, then f three times.

        The third is the product with the router's probability (moe/experts.py).
        """
        shape = self.shape
        width = shape.moe_ffn_size / self.layout.etp
        shared = 0.0
        if shape.num_shared_experts:
            # the router keeps the norm's output as it was
            shared = self._gated("shared_experts", shape.num_shared_experts * shape.moe_ffn_size)
            shared += self.share * shape.hidden_size * self.apart("shared_experts")
        return {
            "router": self.share * shape.num_experts * 3 * 4,
            "experts_in": self.routed * shape.hidden_size * self.code("experts"),
            "experts_fc1": self.routed * 2 * width * self.item,
            "experts_act": self.routed * width * (2 * self.item + self.code("experts")),
            "shared": shared,
        }

    def working_bytes(self, dense: bool) -> float:
        """Gradients on their way through the widest products of a layer; and its input of all tokens, gathered."""
        shape = self.shape
        gathered = self.tokens * shape.hidden_size * self.item
        if dense:
            return gathered + self.tokens * 3 * shape.ffn_size / self.layout.tp * self.item
        width = 2 * shape.hidden_size + 3 * shape.moe_ffn_size / self.layout.etp
        return gathered + self.routed * width * self.item


def kept_and_recomputed(
    row: RowSize,
    layers: Sequence[bool],
    options: dict[str, Any],
    are_linear: Sequence[bool] = (),
) -> tuple[float, float]:
    """Bytes that a chunk of these layers keeps of each micro-batch, and of one more at a time in the backward pass.

    The latter are what is recomputed, and the gradients on their way through the layer (`RowSize.working_bytes`).

    layers: of each whether it has an MLP in place of experts. are_linear: whether it has linear attention; (): none
    has. options: Megatron's recompute_* fields: full keeps the
    input of each run of layers (uniform) or of the first ones (block); selective drops parts.
    """
    linear = are_linear or [False] * len(layers)
    saved = [row.layer(*kinds) for kinds in zip(layers, linear, strict=True)]
    working = max((row.working_bytes(dense) for dense in layers), default=0.0)
    mode = options.get("recompute_granularity")
    number = options.get("recompute_num_layers") or 1
    if mode == "full":
        whole = [sum(parts.values()) for parts in saved]
        uniform = options.get("recompute_method", "uniform") == "uniform"
        length, end = (number, len(whole)) if uniform else (1, number)
        runs = [whole[start : start + length] for start in range(0, min(end, len(whole)), length)]
        kept = len(runs) * row.boundary_bytes + sum(whole[end:])
        return kept, max(map(sum, runs), default=0.0) + working
    dropped: set[str] = set()
    if mode == "selective":
        for name in options.get("recompute_modules") or ["core_attn"]:
            dropped |= DROPPED_BY.get(name, set())
    again = max(
        (sum(size for part, size in parts.items() if part in dropped) for parts in saved),
        default=0.0,
    )
    kept = sum(size for parts in saved for part, size in parts.items() if part not in dropped)
    return kept, again + working


def in_flight(
    layout: TrainLayout, stage: int, micro_batches: int, *, ahead: bool = False
) -> list[int]:
    """Micro-batches of each chunk of a stage that wait for their backward pass, at most.

    1F1B: the micro-batches that a stage sends on before the first comes back (schedules.py,
    get_pp_rank_microbatches), and the current micro-batch. Interleaved, chunks take turns in groups of PP
    micro-batches. micro_batches: of an update. ahead: with one more, whose pass runs beside another's pass back
    (overlap_moe_expert_parallel_comm).
    """
    if layout.vpp == 1:
        return [min(layout.pp - stage + ahead, micro_batches)]
    units = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1 + ahead
    units = min(units, micro_batches * layout.vpp)
    counts = Counter(unit // layout.pp % layout.vpp for unit in range(units))
    return [counts[chunk] for chunk in range(layout.vpp)]


def activation_bytes(size: ModelSize, stage: int, micro_batches: int) -> float:
    """Activation bytes of a rank of a pipeline stage, when the most micro-batches are in flight."""
    row = row_of(size)
    train = size.recipe.train
    layout = size.layout
    ahead = bool(train.megatron.get(PAIRED_PASSES))
    waiting = in_flight(layout, stage, micro_batches, ahead=ahead)
    total = 0.0
    again = 0.0
    for chunk, number in enumerate(waiting):
        layers = layout.layers(stage, size.shape.num_layers, chunk)
        are_dense = list(map(size.shape.is_dense, layers))
        options = recompute_fields(train, stage)
        are_linear = list(map(size.shape.is_linear, layers))
        kept, once = kept_and_recomputed(row, are_dense, options, are_linear)
        total += number * kept
        again = max(again, once)
    if stage == layout.pp - 1:
        total += waiting[-1] * 2 * row.boundary_bytes  # the last norm's input and output
        # their activations are kept (parallel/model.py); two hidden states go in side by side
        if train.mtp_loss:
            ahead = sum(row.layer(dense=False).values()) + 3 * row.boundary_bytes
            total += waiting[-1] * size.shape.num_mtp_layers * ahead
    return total + again


def forward_bytes(size: ModelSize, stage: int) -> float:
    """Activation bytes of a forward pass without a backward pass: one layer's."""
    row = row_of(size)
    kinds = {size.shape.is_dense(layer) for layer in size.layers(stage)}
    return max((sum(row.layer(dense).values()) for dense in kinds), default=0.0)


def logits_bytes(size: ModelSize, stage: int) -> float:
    """Of the last stage's output layer, forward and backward: parallel/logprobs.py.

    Hidden states of all tokens, gathered, and their gradient; the weight's gradient in float32 and in the model's type;
    logits by chunks. A scorer has hidden states in float32 in place of all that.
    """
    if stage != size.layout.pp - 1:
        return 0.0
    row = row_of(size)
    shape = size.shape
    if shape.num_labels:
        return row.share * shape.hidden_size * 4
    rows = size.layout.padded_vocab(shape.vocab_size) // size.layout.tp
    depths = 1 + shape.num_mtp_layers * bool(size.recipe.train.mtp_loss)
    hidden = (depths + 1) * row.tokens * shape.hidden_size * row.item
    logits = min(LOGITS_CHUNK_BYTES, row.tokens * rows * 4) * LOGITS_CHUNKS
    return hidden + logits + rows * shape.hidden_size * (4 + row.item)


def row_of(size: ModelSize) -> RowSize:
    """The fullest micro-batch of a model's ranks."""
    tokens = size.recipe.train.tokens_per_micro_batch / size.layout.cp
    fp8 = fp8_linears_of(size)
    return RowSize(size.shape, size.layout, tokens, size.weight_bytes, fp8)
