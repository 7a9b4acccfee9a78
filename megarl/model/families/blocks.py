"""The blocks of transformer layers, each declared once: its tensors in the checkpoint, and where both sides have them.

Megatron's `linear_qkv` has, for each key/value group, its query heads, then its key, then its value; `linear_fc1` is
[gate; up] of the rank's slice; MLA's down projections are replicated (megatron/core/transformer). SGLang's `qkv_proj`
has the rank's query heads, then its key heads, then its value heads; `gate_up_proj` is [gate; up];
`fused_qkv_a_proj_with_mqa` is [q_a; kv_a] on every rank (sglang/srt/layers/linear.py, models/deepseek_v2.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from megarl.model.families.layouts import (
    STACK,
    Axis,
    Layout,
    ParamPart,
    Size,
    TensorPart,
    cols,
    copy,
    cut,
    rows,
    spread,
    vector,
    woven,
)
from megarl.model.shape import ModelShape


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a layer, with the names that it has inside the layer.

    tensors: those of the checkpoint. takes_norm: the linear layer of Megatron's into which TransformerEngine merges the
    norm before the block; "": none. Blocks are compared by identity: the functions that make them keep what they made.
    """

    tensors: tuple[tuple[str, Size], ...]
    megatron: tuple[ParamPart, ...]
    sglang: tuple[ParamPart, ...]
    takes_norm: str = ""

    def __add__(self, other: Block) -> Block:
        """Both, one after the other."""
        return Block(
            self.tensors + other.tensors,
            self.megatron + other.megatron,
            self.sglang + other.sglang,
            self.takes_norm or other.takes_norm,
        )


class Layer(NamedTuple):
    """What mixes tokens, after the first norm of a layer, and what follows the second norm."""

    mixer: Block
    mlp: Block


class Modules(NamedTuple):
    """The names of a module inside a layer, in the checkpoint, in Megatron and in SGLang, with a dot at the end."""

    files: str
    megatron: str
    sglang: str

    def inside(self, files: str, megatron: str = "", sglang: str = "") -> Modules:
        """A module inside this one. megatron, sglang: where they are not as in the checkpoint."""
        return Modules(
            self.files + files,
            self.megatron + (megatron or files),
            self.sglang + (sglang or files),
        )

    def block(
        self,
        tensors: Iterable[tuple[str, Size]],
        megatron: Iterable[ParamPart],
        sglang: Iterable[ParamPart],
        takes_norm: str = "",
    ) -> Block:
        """A block of this module, given the names inside it."""
        return Block(
            tuple((self.files + name, size) for name, size in tensors),
            tuple(self._moved(entry, self.megatron) for entry in megatron),
            tuple(self._moved(entry, self.sglang) for entry in sglang),
            takes_norm and self.megatron + takes_norm,
        )

    def _moved(self, entry: ParamPart, prefix: str) -> ParamPart:
        pieces = tuple(
            piece._replace(name=self.files + piece.name) for piece in entry.layout.pieces
        )
        return replace(
            entry,
            param=prefix + entry.param,
            layout=replace(entry.layout, pieces=pieces),
            merges_into=entry.merges_into and prefix + entry.merges_into,
        )


ATTENTION = Modules("self_attn.", "self_attention.", "self_attn.")
MLP = Modules("mlp.", "mlp.", "mlp.")
FC1 = "linear_fc1.weight"
FC2 = "linear_fc2.weight"


def bias_of(weight: str) -> str:
    """The name of a linear layer's bias, given that of its weight."""
    return weight.removesuffix("weight") + "bias"


def with_biases(
    pieces: Iterable[TensorPart], biased: Iterable[TensorPart]
) -> list[tuple[str, Size]]:
    """The tensors of some linear layers, and after each that is among `biased` its bias."""
    tensors: list[tuple[str, Size]] = []
    names = {piece.name for piece in biased}
    for piece in pieces:
        tensors.append(piece.tensor)
        if piece.name in names:
            tensors.append((bias_of(piece.name), (1, piece.total, 1)))
    return tensors


@cache
def attention(shape: ModelShape, at: Modules = ATTENTION, *, wide_norms: bool = False) -> Block:
    """Grouped-query attention, with norms of queries and keys, and biases, where the shape has them.

    wide_norms: the norms are over all heads at once, so that each rank has the weights of its own heads (MiniMax-M2).
    """
    heads = shape.num_heads
    groups = shape.num_kv_heads
    width = shape.head_dim
    q = rows("q_proj.weight", heads, width, shape.hidden_size)
    k = rows("k_proj.weight", groups, width, shape.hidden_size)
    v = rows("v_proj.weight", groups, width, shape.hidden_size)
    o = cols("o_proj.weight", heads, width, shape.hidden_size)
    norms = _head_norms(shape, wide_norms)
    bias = shape.qkv_bias
    qkv = "qkv_proj.weight"
    return at.block(
        tensors=[
            *with_biases((q, k, v, o), biased=(q, k, v) if bias else ()),
            *(norm.pieces[0].tensor for norm in norms),
        ],
        megatron=[
            ParamPart("linear_qkv.weight", cut(q, k, v, groups=groups), bias=bias),
            ParamPart("linear_proj.weight", cut(o)),
            *_norms_in_megatron(norms),
        ],
        sglang=[
            ParamPart(qkv, cut(q), bias=bias),
            ParamPart("o_proj.weight", cut(o)),
            ParamPart(qkv, spread(k), bias=bias),
            ParamPart(qkv, spread(v), bias=bias),
            *(ParamPart(norm.pieces[0].name, norm) for norm in norms),
        ],
        takes_norm="linear_qkv",
    )


def _head_norms(shape: ModelShape, wide: bool = False) -> list[Layout]:
    """The norms of queries and of keys. wide: over all heads at once."""
    names = "q_norm.weight", "k_norm.weight"
    if not shape.qk_norm:
        return []
    if not wide:
        return [copy(vector(name, shape.head_dim)) for name in names]
    heads = shape.num_heads, shape.num_kv_heads
    return [
        spread(vector(name, shape.head_dim, units))
        for name, units in zip(names, heads, strict=True)
    ]


def _norms_in_megatron(norms: Iterable[Layout]) -> list[ParamPart]:
    return [ParamPart(f"{norm.pieces[0].name[0]}_layernorm.weight", norm) for norm in norms]


@cache
def gated_attention(shape: ModelShape, at: Modules = ATTENTION) -> Block:
    """Grouped-query attention whose output a sigmoid gate multiplies, with norms of each head's queries and keys.

    q_proj has, for each head, the rows of its query, then those of its gate, and so has SGLang (models/qwen3_next.py).
    Megatron's `linear_qkv` has, for each group, its queries, then its gates, its key and its value (attention.py); with
    more tensor-parallel ranks than groups Megatron does not take a rank's own gates.
    """
    heads = shape.num_heads
    groups = shape.num_kv_heads
    width = shape.head_dim
    both = rows("q_proj.weight", heads, 2 * width, shape.hidden_size)
    q, gate = woven("q_proj.weight", heads, (width, width), shape.hidden_size)
    k = rows("k_proj.weight", groups, width, shape.hidden_size)
    v = rows("v_proj.weight", groups, width, shape.hidden_size)
    o = cols("o_proj.weight", heads, width, shape.hidden_size)
    norms = _head_norms(shape)
    return at.block(
        tensors=[
            *(whole.tensor for whole in (both, k, v, o)),
            *(norm.pieces[0].tensor for norm in norms),
        ],
        megatron=[
            ParamPart("linear_qkv.weight", cut(q, gate, k, v, groups=groups)),
            ParamPart("linear_proj.weight", cut(o)),
            *_norms_in_megatron(norms),
        ],
        sglang=[
            ParamPart("qkv_proj.weight", cut(both)),
            ParamPart("o_proj.weight", cut(o)),
            ParamPart("qkv_proj.weight", spread(k)),
            ParamPart("qkv_proj.weight", spread(v)),
            *(ParamPart(norm.pieces[0].name, norm) for norm in norms),
        ],
        takes_norm="linear_qkv",
    )


@cache
def latent_attention(shape: ModelShape, at: Modules = ATTENTION) -> Block:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); queries with a rank of their own, or without."""
    mla = shape.mla
    heads = shape.num_heads
    hidden = shape.hidden_size
    assert mla is not None
    kv_a = rows("kv_a_proj_with_mqa.weight", 1, mla.kv_lora_rank + mla.rope_dim, hidden)
    kv_norm = vector("kv_a_layernorm.weight", mla.kv_lora_rank)
    kv_b = rows("kv_b_proj.weight", heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
    o = cols("o_proj.weight", heads, mla.v_dim, hidden)
    queries = _latent_queries(shape, at)
    kv = "kv_a_proj_with_mqa.weight"
    if mla.q_lora_rank:
        kv = "fused_qkv_a_proj_with_mqa.weight"
    own = at.block(
        tensors=[kv_a.tensor, kv_norm.tensor, kv_b.tensor, o.tensor],
        megatron=[
            ParamPart("linear_kv_down_proj.weight", copy(kv_a)),
            ParamPart("kv_layernorm.weight", copy(kv_norm), merges_into="linear_kv_up_proj"),
            ParamPart("linear_kv_up_proj.weight", cut(kv_b)),
            ParamPart("linear_proj.weight", cut(o)),
        ],
        sglang=[
            ParamPart(kv, copy(kv_a)),
            ParamPart(kv_norm.name, copy(kv_norm)),
            ParamPart(kv_b.name, cut(kv_b)),
            ParamPart(o.name, cut(o)),
        ],
    )
    # SGLang has the down projections first, then the norms, then what ranks cut.
    (*down, query) = queries.sglang
    (kv_down, norm, *rest) = own.sglang
    in_order = (*down[:1], kv_down, *down[1:], norm, query, *rest)
    return Block(queries.tensors + own.tensors, queries.megatron + own.megatron, in_order)


def _latent_queries(shape: ModelShape, at: Modules) -> Block:
    mla = shape.mla
    hidden = shape.hidden_size
    assert mla is not None
    width = mla.nope_dim + mla.rope_dim
    rank = mla.q_lora_rank
    if not rank:
        q = rows("q_proj.weight", shape.num_heads, width, hidden)
        return at.block(
            [q.tensor], [ParamPart("linear_q_proj.weight", cut(q))], [ParamPart(q.name, cut(q))]
        )
    q_a = rows("q_a_proj.weight", 1, rank, hidden)
    norm = vector("q_a_layernorm.weight", rank)
    q_b = rows("q_b_proj.weight", shape.num_heads, width, rank)
    return at.block(
        tensors=[q_a.tensor, norm.tensor, q_b.tensor],
        megatron=[
            ParamPart("linear_q_down_proj.weight", copy(q_a)),
            ParamPart("q_layernorm.weight", copy(norm), merges_into="linear_q_up_proj"),
            ParamPart("linear_q_up_proj.weight", cut(q_b)),
        ],
        sglang=[
            ParamPart("fused_qkv_a_proj_with_mqa.weight", copy(q_a)),
            ParamPart(norm.name, copy(norm)),
            ParamPart(q_b.name, cut(q_b)),
        ],
    )


@cache
def dense_mlp(shape: ModelShape, at: Modules = MLP) -> Block:
    """A gated MLP in place of experts."""
    block = gated_mlp(shape.hidden_size, shape.ffn_size, "dense", at)
    return replace(block, takes_norm=at.megatron + "linear_fc1")


def gated_mlp(hidden: int, width: int, over: Axis, at: Modules) -> Block:
    """gate_proj, up_proj and down_proj of one MLP."""
    gate, up = (rows(f"{kind}_proj.weight", width, 1, hidden) for kind in ("gate", "up"))
    down = cols("down_proj.weight", width, 1, hidden)
    gate_up = "gate_up_proj.weight"
    return at.block(
        tensors=[gate.tensor, up.tensor, down.tensor],
        megatron=[ParamPart(FC1, cut(gate)), ParamPart(FC1, cut(up)), ParamPart(FC2, cut(down))],
        sglang=[
            ParamPart(gate_up, cut(gate), over),
            ParamPart(gate_up, cut(up), over),
            ParamPart(down.name, cut(down), over),
        ],
    )


class Experts(NamedTuple):
    """What differs between the families' layers of experts: the names in the checkpoint, and types in SGLang.

    router, bias, experts: in the checkpoint, inside the MLP; router_param, bias_param: in SGLang, where they differ.
    kinds: an expert's gate, up and down projection. shared: the shared experts' module, shared_gate: the weight of the
    sigmoid gate of their output, "": none. engine_router_dtype: torch's name of the type of SGLang's router; "": the
    model's.
    """

    router: str = "gate.weight"
    bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    shared_gate: str = ""
    engine_router_dtype: str = ""
    router_param: str = ""
    bias_param: str = ""


USUAL_EXPERTS = Experts()
GATED_SHARED_EXPERTS = Experts(shared="shared_expert", shared_gate="shared_expert_gate.weight")
# where Mixtral and those after it have their experts, and an expert's gate, up and down projection
BLOCK_SPARSE_MOE = Modules("block_sparse_moe.", "mlp.", "block_sparse_moe.")
BLOCK_SPARSE_KINDS = ("w1", "w3", "w2")


@cache
def experts(shape: ModelShape, names: Experts = USUAL_EXPERTS, at: Modules = MLP) -> Block:
    """A router, routed experts and, where the shape has them, shared ones."""
    router = _router(shape, names, at)
    routed = _routed(shape, names, at)
    if not shape.num_shared_experts:
        return router + routed
    width = shape.num_shared_experts * shape.moe_ffn_size
    shared = gated_mlp(
        shape.hidden_size,
        width,
        "shared",
        at.inside(f"{names.shared}.", megatron="shared_experts."),
    )
    if names.shared_gate:
        shared += _shared_gate(shape, names, at)
    return Block(
        router.tensors + shared.tensors + routed.tensors,
        router.megatron + shared.megatron + routed.megatron,
        router.sglang + routed.sglang + shared.sglang,
    )


def _router(shape: ModelShape, names: Experts, at: Modules) -> Block:
    weight = rows(names.router, 1, shape.num_experts, shape.hidden_size)
    router_param = names.router_param or names.router
    block = at.block(
        [weight.tensor],
        [ParamPart("router.weight", copy(weight))],
        [ParamPart(router_param, copy(weight), dtype=names.engine_router_dtype)],
    )
    if not shape.router_bias:
        return block
    bias = vector(names.bias, shape.num_experts)
    return block + at.block(
        [bias.tensor],
        [ParamPart("router.expert_bias", copy(bias), dtype="float32")],
        [ParamPart(names.bias_param or names.bias, copy(bias), dtype="float32")],
    )


def _shared_gate(shape: ModelShape, names: Experts, at: Modules) -> Block:
    """A sigmoid of hidden states that multiplies what the shared experts return: a matrix of one row."""
    gate = rows(names.shared_gate, 1, 1, shape.hidden_size)
    return at.block(
        [gate.tensor],
        [ParamPart("shared_experts.gate_weight", copy(gate))],
        [ParamPart(gate.name, copy(gate))],
    )


def _routed(shape: ModelShape, names: Experts, at: Modules) -> Block:
    """Megatron has a stack of linear_fc1 and one of linear_fc2, SGLang w13_weight and w2_weight of all experts."""
    items = shape.num_experts
    hidden = shape.hidden_size
    width = shape.moe_ffn_size
    stack = f"{names.experts}.{STACK}."
    gate, up = (rows(f"{stack}{kind}.weight", width, 1, hidden, items) for kind in names.kinds[:2])
    down = cols(f"{stack}{names.kinds[2]}.weight", width, 1, hidden, items)
    w13 = "experts.w13_weight"
    w2 = "experts.w2_weight"
    fc1 = "experts.linear_fc1"
    fc2 = "experts.linear_fc2"
    return at.block(
        tensors=[gate.tensor, up.tensor, down.tensor],
        megatron=[
            ParamPart(fc1, cut(gate), "experts"),
            ParamPart(fc1, cut(up), "experts"),
            ParamPart(fc2, cut(down), "experts"),
        ],
        sglang=[
            ParamPart(w13, cut(gate), "experts"),
            ParamPart(w13, cut(up), "experts"),
            ParamPart(w2, cut(down), "experts"),
        ],
    )


def usual_layer(shape: ModelShape, layer: int) -> Layer:
    """Attention of the kind that the shape has sizes for, then an MLP in the first layers and experts in the others."""
    return Layer(usual_attention(shape), usual_mlp(shape, layer))


def usual_attention(shape: ModelShape) -> Block:
    """Latent attention where the shape has its sizes, else grouped-query attention."""
    if shape.mla:
        return latent_attention(shape)
    return attention(shape)


def usual_mlp(shape: ModelShape, layer: int, names: Experts = USUAL_EXPERTS) -> Block:
    """An MLP in the first layers, then experts."""
    if shape.is_dense(layer):
        return dense_mlp(shape)
    return experts(shape, names)
