"""The weight map of the engines' ranks: the parameters of SGLang 0.5.21's models.

Families: Qwen3MoeForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM, LlamaForCausalLM. Facts from sglang/srt:
- layers/linear.py: `qkv_proj` has the rank's query heads, then its key heads, then its value heads; with fewer
  key/value heads than ranks neighbours have the same head. `gate_up_proj` is [gate; up].
- layers/moe/fused_moe_triton/layer.py: `w13_weight` is [experts, gate; up, hidden], `w2_weight` [experts, hidden,
  width]; runtime_context.py: the TP rank is expert rank x (TP / EP) + rank inside the expert.
- models/deepseek_v2.py: `fused_qkv_a_proj_with_mqa` is [q_a; kv_a], replicated on every rank; the shared experts are an
  MLP of their own, because rollout/sglang/arguments.py switches their fusion with the routed experts off.
- layers/vocab_parallel_embedding.py: the vocabulary is padded to 64, on CPU to 64 x TP where TP does not divide that.
- DP attention: attention and embedding are split over the attention group of TP / DP ranks (TP rank % its size), so
  with `enable_dp_lm_head` is the output layer. All other weights are split over the whole TP group, but with
  `moe_dense_tp_size` 1 the dense layers are whole on each rank, and with DeepEP or SGLANG_SHARED_EXPERT_TP1 the shared
  experts are (models/deepseek_v2.py).
- layers/quantization/fp8.py: `<weight>_scale_inv` has one float32 for each 128 x 128 tile of a weight. (The scales
  of the KV cache are no weights: engine_model.py writes them.)
- models/deepseek_nextn.py and those of the other families: the draft model is one multi-token prediction layer,
  `model.decoder`, split as the decoder's layers with experts; eh_proj is whole, and never fp8. Its embedding and output
  layer are the target model's own parameters. A parameter of the draft model has the name that `engine_model.joined`
  gives it.
Without drafts the engine does not load the multi-token prediction layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megarl.model.quantisation import FP8_TILE
from megarl.model.shape import MlaShape, ModelShape
from megarl.model.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, mtp_prefix
from megarl.placement.engine_layout import VOCAB_MULTIPLE, EngineLayout
from megarl.resharding.shards import FP8, LayoutError, Part, Range, Shard, intersect, share, tiles

ONE_ITEM = (0, 1)
DRAFT = "draft."  # begins the names of the draft model's parameters


class Holder(NamedTuple):
    """The TP ranks of an engine with rank // `each` % `groups` == `index`."""

    groups: int
    index: int
    each: int = 1


EVERYONE = Holder(1, 0)
Placed = Iterator[tuple[Holder, Shard]]


def parts(shape: ModelShape, engine: EngineLayout) -> list[Part]:
    """The shards of all engines' slots, grouped by replicas; inside a part in the order of the layers.

    Raises LayoutError where an fp8 tile would be split.
    """
    shards_by_members: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    lists: dict[Holder, list[Shard]] = {}
    for holder, shard in _placed(shape, engine):
        if holder not in lists:
            lists[holder] = shards_by_members[_slots(engine, holder)]
        lists[holder].append(shard)
    return [Part(tuple(shards), members) for members, shards in shards_by_members.items()]


def shards(shape: ModelShape, engine: EngineLayout, tp_rank: int) -> list[Shard]:
    """All shards of rank `tp_rank` of an engine."""
    first_engine = replace(engine, count=1, first=0)
    return [
        shard
        for part in parts(shape, first_engine)
        if tp_rank in part.members
        for shard in part.shards
    ]


def padded_vocab(vocab_size: int, ranks: int) -> int:
    """Rows of the padded embedding, summed over its ranks."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % ranks:
        padded = -(-vocab_size // (VOCAB_MULTIPLE * ranks)) * VOCAB_MULTIPLE * ranks
    return padded


def _slots(engine: EngineLayout, holder: Holder) -> tuple[int, ...]:
    ranks = [
        rank for rank in range(engine.tp) if rank // holder.each % holder.groups == holder.index
    ]
    return tuple(engine.first + e * engine.tp + rank for e in range(engine.count) for rank in ranks)


def _placed(shape: ModelShape, engine: EngineLayout) -> Placed:
    yield from _vocab_rows(shape, EMBEDDING, engine.attention_tp)
    for layer in range(shape.num_layers):
        yield from _layer(shape, engine, layer)
    yield from _norm(FINAL_NORM, shape.hidden_size)
    if not shape.tied:
        yield from _vocab_rows(shape, LM_HEAD, engine.head_ranks)
    if engine.draft:
        yield from _draft(shape, engine)


def _layer(shape: ModelShape, engine: EngineLayout, layer: int) -> Placed:
    prefix = layer_prefix(layer)
    yield from _norm(prefix + "input_layernorm.weight", shape.hidden_size)
    yield from ATTENTION[shape.attention_map](shape, engine, prefix + "self_attn.")
    yield from _norm(prefix + "post_attention_layernorm.weight", shape.hidden_size)
    if shape.is_dense(layer):
        yield from _mlp(
            prefix + "mlp.", engine, shape.hidden_size, shape.ffn_size, engine.dense_ranks
        )
    else:
        yield from _experts(shape, engine, prefix + "mlp.")


def _draft(shape: ModelShape, engine: EngineLayout) -> Placed:
    """The draft model, without the embedding and the output layer that it shares with the target model."""
    prefix = mtp_prefix(shape, 0)
    hidden = shape.hidden_size
    model = DRAFT + "model."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield (
            EVERYONE,
            Shard(f"{prefix}{norm}.weight", (0, hidden), (0, 1), f"{model}{norm}.weight"),
        )
    yield (
        EVERYONE,
        Shard(prefix + "eh_proj.weight", (0, hidden), (0, 2 * hidden), model + "eh_proj.weight"),
    )
    for holder, shard in _layer(shape, engine, shape.num_layers):
        yield holder, shard._replace(param=f"{model}decoder.{shard.param.removeprefix(prefix)}")


def _vocab_rows(shape: ModelShape, name: str, ranks: int) -> Placed:
    """The vocabulary rows of each rank; the shard is empty where all of them are padding."""
    per_rank = padded_vocab(shape.vocab_size, ranks) // ranks
    for rank in range(ranks):
        rows = intersect((rank * per_rank, (rank + 1) * per_rank), (0, shape.vocab_size))
        yield Holder(ranks, rank), Shard(name, rows, (0, shape.hidden_size), name)


def _norm(name: str, size: int) -> Placed:
    yield EVERYONE, Shard(name, (0, size), (0, 1), name)


def _weight(
    holder: Holder,
    fp8: bool,
    name: str,
    rows: Range,
    cols: Range,
    param: str = "",
    row: int = 0,
    items: Range = ONE_ITEM,
) -> Placed:
    """The shard of a matrix that SGLang quantises, at `row` of the parameter, and in an fp8 engine its scales.

    param: where the name is not the checkpoint's.
    """
    param = param or name
    if not fp8:
        yield holder, Shard(name, rows, cols, param, (0, row, 0), items)
        return
    if rows[0] % FP8_TILE or cols[0] % FP8_TILE or row % FP8_TILE:
        raise LayoutError(
            f"{name}: rows {rows}, columns {cols} at row {row} of {param} cut a tile of {FP8_TILE}"
        )
    yield holder, Shard(name, rows, cols, param, (0, row, 0), items, FP8)
    scales = f"{name}_scale_inv"
    tiled = f"{param}_scale_inv"
    yield (
        holder,
        Shard(scales, tiles(rows), tiles(cols), tiled, (0, row // FP8_TILE, 0), items, "float32"),
    )


def _attention(shape: ModelShape, engine: EngineLayout, prefix: str) -> Placed:
    ranks = engine.attention_tp
    hidden = (0, shape.hidden_size)
    param = prefix + "qkv_proj."
    q_rows = shape.num_heads * shape.head_dim
    kv_rows = shape.num_kv_heads * shape.head_dim
    replicas = max(1, ranks // shape.num_kv_heads)
    kv_ranks = ranks // replicas
    after_q = q_rows // ranks
    after_k = q_rows // ranks + kv_rows // kv_ranks
    for rank in range(ranks):
        holder = Holder(ranks, rank)
        rows = share(q_rows, ranks, rank)
        yield from _projection(shape, engine, holder, prefix + "q_proj.", rows, param, 0)
        yield from _weight(holder, engine.fp8, prefix + "o_proj.weight", hidden, rows)
    for rank in range(kv_ranks):
        holder = Holder(kv_ranks, rank, replicas)
        rows = share(kv_rows, kv_ranks, rank)
        yield from _projection(shape, engine, holder, prefix + "k_proj.", rows, param, after_q)
        yield from _projection(shape, engine, holder, prefix + "v_proj.", rows, param, after_k)
    if shape.qk_norm:
        yield from _norm(prefix + "q_norm.weight", shape.head_dim)
        yield from _norm(prefix + "k_norm.weight", shape.head_dim)


def _projection(
    shape: ModelShape,
    engine: EngineLayout,
    holder: Holder,
    name: str,
    rows: Range,
    param: str,
    row: int,
) -> Placed:
    yield from _weight(
        holder, engine.fp8, name + "weight", rows, (0, shape.hidden_size), param + "weight", row
    )
    if shape.qkv_bias:
        yield holder, Shard(name + "bias", rows, (0, 1), param + "bias", (0, row, 0))


def _latent_attention(shape: ModelShape, engine: EngineLayout, prefix: str) -> Placed:
    mla = shape.mla
    ranks = engine.attention_tp
    hidden = (0, shape.hidden_size)
    assert mla is not None
    yield from _down_projections(engine.fp8, prefix, mla, hidden)
    if mla.q_lora_rank:
        yield from _norm(prefix + "q_a_layernorm.weight", mla.q_lora_rank)
    yield from _norm(prefix + "kv_a_layernorm.weight", mla.kv_lora_rank)
    if mla.q_lora_rank:
        query = "q_b_proj.weight"
    else:
        query = "q_proj.weight"
    query_cols = (0, mla.q_lora_rank or shape.hidden_size)
    for rank in range(ranks):
        q_rows, kv_rows, o_cols = (
            share(shape.num_heads * size, ranks, rank)
            for size in (mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.v_dim, mla.v_dim)
        )
        for name, rows, cols in (
            (query, q_rows, query_cols),
            ("kv_b_proj.weight", kv_rows, (0, mla.kv_lora_rank)),
            ("o_proj.weight", hidden, o_cols),
        ):
            yield from _weight(Holder(ranks, rank), engine.fp8, prefix + name, rows, cols)


def _down_projections(fp8: bool, prefix: str, mla: MlaShape, hidden: Range) -> Placed:
    kv_rows = (0, mla.kv_lora_rank + mla.rope_dim)
    kv_name = prefix + "kv_a_proj_with_mqa.weight"
    if not mla.q_lora_rank:
        yield from _weight(EVERYONE, fp8, kv_name, kv_rows, hidden)
        return
    fused = prefix + "fused_qkv_a_proj_with_mqa.weight"
    yield from _weight(
        EVERYONE, fp8, prefix + "q_a_proj.weight", (0, mla.q_lora_rank), hidden, fused
    )
    yield from _weight(EVERYONE, fp8, kv_name, kv_rows, hidden, fused, mla.q_lora_rank)


# What the ranks of an engine hold of a layer's attention, by ModelShape.attention_map.
ATTENTION: dict[str, Callable[[ModelShape, EngineLayout, str], Placed]] = {
    "grouped_query": _attention,
    "latent": _latent_attention,
}


def _mlp(prefix: str, engine: EngineLayout, hidden_size: int, width: int, ranks: int) -> Placed:
    hidden = (0, hidden_size)
    gate_up = prefix + "gate_up_proj.weight"
    for rank in range(ranks):
        to = (Holder(ranks, rank), engine.fp8)
        ffn_range = share(width, ranks, rank)
        yield from _weight(*to, prefix + "gate_proj.weight", ffn_range, hidden, gate_up)
        yield from _weight(
            *to, prefix + "up_proj.weight", ffn_range, hidden, gate_up, width // ranks
        )
        yield from _weight(*to, prefix + "down_proj.weight", hidden, ffn_range)


def _experts(shape: ModelShape, engine: EngineLayout, prefix: str) -> Placed:
    hidden = (0, shape.hidden_size)
    ffn = shape.moe_ffn_size
    stack = prefix + "experts.{}."
    param = prefix + "experts."
    gate = prefix + "gate."
    dtype = "float32" if shape.has_wide_router else ""
    router = Shard(gate + "weight", (0, shape.num_experts), hidden, gate + "weight", dtype=dtype)
    yield EVERYONE, router
    if shape.router_bias:
        bias = gate + "e_score_correction_bias"
        yield EVERYONE, Shard(bias, (0, shape.num_experts), (0, 1), bias, dtype="float32")
    for rank in range(engine.tp):
        expert_rank, width_rank = divmod(rank, engine.moe_tp)
        items = share(shape.num_experts, engine.ep, expert_rank)
        ffn_range = share(ffn, engine.moe_tp, width_rank)
        to = (Holder(engine.tp, rank), engine.fp8)
        after_gate = ffn // engine.moe_tp
        w13 = param + "w13_weight"
        w2 = param + "w2_weight"
        yield from _weight(*to, stack + "gate_proj.weight", ffn_range, hidden, w13, items=items)
        yield from _weight(*to, stack + "up_proj.weight", ffn_range, hidden, w13, after_gate, items)
        yield from _weight(*to, stack + "down_proj.weight", hidden, ffn_range, w2, items=items)
    if shape.num_shared_experts:
        width = shape.num_shared_experts * ffn
        prefix = prefix + "shared_experts."
        yield from _mlp(prefix, engine, shape.hidden_size, width, engine.shared_ranks(shape))
