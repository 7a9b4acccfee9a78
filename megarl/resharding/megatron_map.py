"""The weight map of the training ranks: the parameters of Megatron-Core 0.16.1's GPTModel.

Facts from megatron/core: `linear_qkv` has, for each key/value group, its query heads, then its key, then its value,
and is split evenly over TP, inside a group where there are fewer groups than ranks (transformer/attention.py);
`linear_fc1` is [gate; up] of the rank's slice; embedding and output layer are split by vocabulary rows after padding;
MLA's down projections are replicated on every rank (transformer/multi_latent_attention.py); layers are numbered inside
their model chunk; the last stage has the final norm, the output layer (with tied embeddings a copy of the embedding)
and the multi-token prediction layers with another copy; no copies if it is the first stage too
(transformer/multi_token_prediction.py); with such layers the final norm follows the last decoder layer, in whichever
stage that is (transformer/transformer_block.py). A score head, in place of the output layer, is replicated.
TransformerEngine's modules fuse a norm into the next linear layer, and append the numbers of grouped experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megarl.model.shape import SCORE, MlaShape, ModelShape
from megarl.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    STACK,
    expert_stack,
    layer_prefix,
    mtp_prefix,
)
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.shards import Box, Part, Range, Shard, cells, intersect, share

Shards = Iterator[Shard]


def parts(shape: ModelShape, layout: TrainLayout, transformer_engine: bool = False) -> list[Part]:
    """The shards of all ranks, grouped by replicas: dense weights by (stage, TP), experts by (stage, EP, ETP rank).

    transformer_engine: use TransformerEngine's parameter names in place of Megatron's own. Inside a part the shards are
    in the order of the layers.
    """
    names = Names(transformer_engine)
    dense: dict[tuple[int, int], list[int]] = {}
    expert: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        dense.setdefault((at.pp, at.tp), []).append(rank)
        expert.setdefault((at.pp, at.ep, at.etp), []).append(rank)
    all_parts = [
        Part(tuple(_dense(shape, layout, names, stage, tp_rank)), tuple(ranks))
        for (stage, tp_rank), ranks in dense.items()
    ]
    if shape.num_experts:
        all_parts += [
            Part(tuple(_experts(shape, layout, names, stage, ep_rank, etp_rank)), tuple(ranks))
            for (stage, ep_rank, etp_rank), ranks in expert.items()
        ]
    return all_parts


def shards(
    shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool = False
) -> list[Shard]:
    """All shards of training rank `rank`; the shard of vocabulary rows that are all padding is empty."""
    at = layout.coords(rank)
    names = Names(transformer_engine)
    rank_shards = list(_dense(shape, layout, names, at.pp, at.tp))
    if shape.num_experts:
        rank_shards += _experts(shape, layout, names, at.pp, at.ep, at.etp)
    return rank_shards


def split_params(
    shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool = False
) -> frozenset[str]:
    """The parameters of training rank `rank` that are split over its TP group: dense weights that TP cuts, and experts.

    A TP group may hold an expert twice, but as replicas of data parallelism, which share the optimizer's state.
    """
    at = layout.coords(rank)
    names = Names(transformer_engine)
    first, last = (
        _boxes(_dense(shape, layout, names, at.pp, tp_rank)) for tp_rank in (0, layout.tp - 1)
    )
    split = {param for param in first.keys() | last.keys() if first.get(param) != last.get(param)}
    if shape.num_experts:
        experts = _experts(shape, layout, names, at.pp, at.ep, at.etp)
    else:
        experts = ()
    return frozenset(split | _boxes(experts).keys())


def _boxes(rank_shards: Iterable[Shard]) -> dict[str, list[tuple[str, Box]]]:
    """By parameter, the boxes of the logical tensors that it holds."""
    boxes: dict[str, list[tuple[str, Box]]] = {}
    for shard in rank_shards:
        for param, _ in cells(shard):
            boxes.setdefault(param, []).append((shard.name, shard.box))
    return boxes


@dataclass(frozen=True)
class Names:
    """Parameter names that depend on the layer spec."""

    transformer_engine: bool

    def norm(self, plain: str, linear: str) -> str:
        """A norm's own parameter, or that of the linear layer into which it is fused."""
        if self.transformer_engine:
            return f"{linear}.layer_norm_weight"
        return f"{plain}.weight"

    def expert(self, linear: str) -> str:
        """The stack of linear_fc1 or linear_fc2 of the rank's experts."""
        if self.transformer_engine:
            return f"{linear}.weight{STACK}"
        return f"local_experts.{STACK}.{linear}.weight"


class Place(NamedTuple):
    """A module of a layer: the beginnings of its names in the checkpoint (`name`) and in the rank's model (`param`)."""

    layer: int
    name: str
    param: str

    def inside(self, name: str, param: str) -> Place:
        """A module inside this one."""
        return Place(self.layer, self.name + name, self.param + param)

    def weight(self, name: str, linear: str, rows: Range, cols: Range, row: int = 0) -> Shard:
        """Rows and columns of a matrix, in the weight of a linear layer from `row` on."""
        param = f"{self.param}{linear}.weight"
        return Shard(f"{self.name}{name}.weight", rows, cols, param, (0, row, 0))

    def vector(self, name: str, size: int, param: str, dtype: str = "") -> Shard:
        return _vector(self.name + name, size, self.param + param, dtype)


def _places(shape: ModelShape, layout: TrainLayout, stage: int) -> Iterator[Place]:
    """The layers of a stage in order; multi-token prediction layers follow the decoder's."""
    for chunk in range(layout.vpp):
        for local, layer in enumerate(layout.layers(stage, shape.num_layers, chunk)):
            param = f"{_chunk_prefix(layout, chunk)}decoder.layers.{local}."
            yield Place(layer, layer_prefix(layer), param)
    if stage == layout.pp - 1:
        for index in range(shape.num_mtp_layers):
            yield _mtp_place(shape, layout, index).inside("", "transformer_layer.")


def _chunk_prefix(layout: TrainLayout, chunk: int) -> str:
    return f"vpp{chunk}." if layout.vpp > 1 else ""


def _mtp_place(shape: ModelShape, layout: TrainLayout, index: int) -> Place:
    """A multi-token prediction layer."""
    param = f"{_chunk_prefix(layout, layout.vpp - 1)}mtp.layers.{index}."
    return Place(shape.num_layers + index, mtp_prefix(shape, index), param)


def _vector(name: str, size: int, param: str, dtype: str = "") -> Shard:
    return Shard(name, (0, size), (0, 1), param, dtype=dtype)


def _dense(
    shape: ModelShape, layout: TrainLayout, names: Names, stage: int, tp_rank: int
) -> Shards:
    """All weights of one stage and TP rank except routed experts."""
    first = stage == 0
    last = stage == layout.pp - 1
    if first:
        param = _chunk_prefix(layout, 0) + "embedding.word_embeddings.weight"
        yield _vocab_rows(shape, layout, tp_rank, EMBEDDING, param)
    for place in _places(shape, layout, stage):
        yield from ATTENTION[shape.attention_map](shape, layout, names, place, tp_rank)
        yield from _dense_mlp(shape, layout, names, place, tp_rank)
    norm_chunk, norm_stage = divmod(_final_norm_stage(shape, layout), layout.pp)
    if stage == norm_stage:
        param = _chunk_prefix(layout, norm_chunk) + "decoder.final_layernorm.weight"
        yield _vector(FINAL_NORM, shape.hidden_size, param)
    if not last:
        return
    prefix = _chunk_prefix(layout, layout.vpp - 1)
    if shape.num_mtp_layers and not (first and layout.vpp == 1):
        yield _vocab_rows(
            shape, layout, tp_rank, EMBEDDING, prefix + "embedding.word_embeddings.weight"
        )
    for index in range(shape.num_mtp_layers):
        yield from _mtp(shape, layout, index, tp_rank)
    if shape.num_labels:
        yield Shard(
            SCORE, (0, shape.num_labels), (0, shape.hidden_size), prefix + "output_layer.weight"
        )
    elif not shape.tied:
        yield _vocab_rows(shape, layout, tp_rank, LM_HEAD, prefix + "output_layer.weight")
    elif not (first and layout.vpp == 1):
        yield _vocab_rows(shape, layout, tp_rank, EMBEDDING, prefix + "output_layer.weight")


def _final_norm_stage(shape: ModelShape, layout: TrainLayout) -> int:
    """The virtual stage with the decoder's final norm: the last stage, or with MTP that of the last decoder layer."""
    last = layout.pp * layout.vpp - 1
    if shape.num_mtp_layers:
        while last and layout.stage_layers and not layout.stage_layers[last]:
            last -= 1
    return last


def _vocab_rows(
    shape: ModelShape, layout: TrainLayout, tp_rank: int, name: str, param: str
) -> Shard:
    padded = share(layout.padded_vocab(shape.vocab_size), layout.tp, tp_rank)
    return Shard(name, intersect(padded, (0, shape.vocab_size)), (0, shape.hidden_size), param)


def _attention(
    shape: ModelShape, layout: TrainLayout, names: Names, place: Place, tp_rank: int
) -> Shards:
    attention = place.inside("self_attn.", "self_attention.")
    hidden = (0, shape.hidden_size)
    norm = names.norm("input_layernorm", "self_attention.linear_qkv")
    yield place.vector("input_layernorm.weight", shape.hidden_size, norm)
    for letter, rows, row in _fused_rows(shape, layout.tp, tp_rank):
        yield attention.weight(f"{letter}_proj", "linear_qkv", rows, hidden, row)
        if shape.qkv_bias:
            name = f"{attention.name}{letter}_proj.bias"
            yield Shard(name, rows, (0, 1), attention.param + "linear_qkv.bias", (0, row, 0))
    cols = share(shape.num_heads * shape.head_dim, layout.tp, tp_rank)
    yield attention.weight("o_proj", "linear_proj", hidden, cols)
    if shape.qk_norm:
        for letter in "qk":
            norm = f"{letter}_layernorm.weight"
            yield attention.vector(f"{letter}_norm.weight", shape.head_dim, norm)


def _fused_rows(shape: ModelShape, ranks: int, rank: int) -> Iterator[tuple[str, Range, int]]:
    """A rank's rows of the fused projection: ("q", "k" or "v"; rows of that tensor; row of the parameter)."""
    kv_rows = shape.head_dim
    q_rows = shape.num_heads // shape.num_kv_heads * shape.head_dim
    rank_rows = share(shape.num_kv_heads * (q_rows + 2 * kv_rows), ranks, rank)
    start = 0
    for group in range(shape.num_kv_heads):
        for letter, size in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            row, end = intersect((start, start + size), rank_rows)
            if row < end:
                first = group * size + row - start
                yield letter, (first, first + end - row), row - rank_rows[0]
            start += size


def _latent_attention(
    shape: ModelShape, layout: TrainLayout, names: Names, place: Place, tp_rank: int
) -> Shards:
    mla = shape.mla
    hidden = (0, shape.hidden_size)
    assert mla is not None
    attention = place.inside("self_attn.", "self_attention.")
    yield place.vector("input_layernorm.weight", shape.hidden_size, "input_layernorm.weight")
    q_rows, kv_rows, o_cols = (
        share(shape.num_heads * size, layout.tp, tp_rank)
        for size in (mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.v_dim, mla.v_dim)
    )
    yield from _queries(mla, names, attention, q_rows, hidden)
    kv_a = (0, mla.kv_lora_rank + mla.rope_dim)
    yield attention.weight("kv_a_proj_with_mqa", "linear_kv_down_proj", kv_a, hidden)
    norm = names.norm("kv_layernorm", "linear_kv_up_proj")
    yield attention.vector("kv_a_layernorm.weight", mla.kv_lora_rank, norm)
    yield attention.weight("kv_b_proj", "linear_kv_up_proj", kv_rows, (0, mla.kv_lora_rank))
    yield attention.weight("o_proj", "linear_proj", hidden, o_cols)


def _queries(mla: MlaShape, names: Names, attention: Place, rows: Range, hidden: Range) -> Shards:
    rank = mla.q_lora_rank
    if not rank:
        yield attention.weight("q_proj", "linear_q_proj", rows, hidden)
        return
    yield attention.weight("q_a_proj", "linear_q_down_proj", (0, rank), hidden)
    norm = names.norm("q_layernorm", "linear_q_up_proj")
    yield attention.vector("q_a_layernorm.weight", rank, norm)
    yield attention.weight("q_b_proj", "linear_q_up_proj", rows, (0, rank))


# What a TP rank holds of a layer's attention, by ModelShape.attention_map.
ATTENTION: dict[str, Callable[[ModelShape, TrainLayout, Names, Place, int], Shards]] = {
    "grouped_query": _attention,
    "latent": _latent_attention,
}


def _dense_mlp(
    shape: ModelShape, layout: TrainLayout, names: Names, place: Place, tp_rank: int
) -> Shards:
    """The norm and the MLP of a dense layer, or the norm, the router and the shared experts of a MoE layer."""
    mlp = place.inside("mlp.", "mlp.")
    hidden = shape.hidden_size
    norm = "post_attention_layernorm.weight"
    if shape.is_dense(place.layer):
        yield place.vector(norm, hidden, names.norm("pre_mlp_layernorm", "mlp.linear_fc1"))
        yield from _gated(mlp, hidden, shape.ffn_size, layout.tp, tp_rank)
        return
    yield place.vector(norm, hidden, "pre_mlp_layernorm.weight")
    yield mlp.weight("gate", "router", (0, shape.num_experts), (0, hidden))
    if shape.router_bias:
        bias = "gate.e_score_correction_bias"
        yield mlp.vector(bias, shape.num_experts, "router.expert_bias", "float32")
    if shape.num_shared_experts:
        width = shape.num_shared_experts * shape.moe_ffn_size
        shared = mlp.inside("shared_experts.", "shared_experts.")
        yield from _gated(shared, hidden, width, layout.tp, tp_rank)


def _gated(mlp: Place, hidden: int, width: int, ranks: int, rank: int) -> Shards:
    ffn_range = share(width, ranks, rank)
    yield mlp.weight("gate_proj", "linear_fc1", ffn_range, (0, hidden))
    yield mlp.weight("up_proj", "linear_fc1", ffn_range, (0, hidden), width // ranks)
    yield mlp.weight("down_proj", "linear_fc2", (0, hidden), ffn_range)


def _mtp(shape: ModelShape, layout: TrainLayout, index: int, tp_rank: int) -> Shards:
    """The weights of a multi-token prediction layer except those of its transformer layer."""
    place = _mtp_place(shape, layout, index)
    hidden = shape.hidden_size
    norms = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "final_layernorm"}
    for name, param in norms.items():
        yield place.vector(f"{name}.weight", hidden, f"{param}.weight")
    yield place.weight("eh_proj", "eh_proj", share(hidden, layout.tp, tp_rank), (0, 2 * hidden))


def _experts(
    shape: ModelShape, layout: TrainLayout, names: Names, stage: int, ep_rank: int, etp_rank: int
) -> Shards:
    items = share(shape.num_experts, layout.ep, ep_rank)
    hidden = (0, shape.hidden_size)
    ffn_range = share(shape.moe_ffn_size, layout.etp, etp_rank)
    width = shape.moe_ffn_size // layout.etp
    for place in _places(shape, layout, stage):
        if shape.is_dense(place.layer):
            continue
        fc1, fc2 = (
            f"{place.param}mlp.experts.{names.expert(linear)}"
            for linear in ("linear_fc1", "linear_fc2")
        )
        yield Shard(expert_stack(place.layer, "gate_proj"), ffn_range, hidden, fc1, items=items)
        yield Shard(
            expert_stack(place.layer, "up_proj"), ffn_range, hidden, fc1, (0, width, 0), items
        )
        yield Shard(expert_stack(place.layer, "down_proj"), hidden, ffn_range, fc2, items=items)
