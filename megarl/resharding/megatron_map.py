"""Where a training rank keeps each part of the model: Megatron-Core's GPTModel for the Qwen3-MoE family.

Facts from megatron-core 0.16.1: `linear_qkv` holds, for each key/value group, its query heads, then its key, then its
value; `linear_fc1` holds [gate; up] of the rank's slice of an expert; the embedding and the output layer are cut by
vocabulary rows after padding; layers are numbered inside their pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.parallel.layout import RankCoords, TrainLayout
from megarl.resharding.shards import EMBEDDING, LM_HEAD, Range, Shard, intersect
from megarl.resharding.tensors import FINAL_NORM, expert_prefix
from megarl.types import ModelShape


def shards(shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool = False) -> list[Shard]:
    """Every rectangle that training rank `rank` holds.

    transformer_engine chooses TransformerEngine's parameter names (norm fused into linear_qkv, grouped experts)
    instead of Megatron's local ones. A rank whose vocabulary rows are all padding holds an empty rectangle of them.
    """
    at = layout.coords(rank)
    found: list[Shard] = []
    if at.pp == 0:
        found.append(_vocab_rows(shape, layout, at, EMBEDDING, "embedding.word_embeddings.weight"))
    for local, layer in enumerate(layout.layers(at.pp, shape.num_layers)):
        source, param = f"model.layers.{layer}.", f"decoder.layers.{local}."
        found += _attention(shape, layout, at, source + "self_attn.", param + "self_attention.")
        found += _norms_and_router(shape, source, param, transformer_engine)
        found += _experts(shape, layout, at, layer, param + "mlp.experts.", transformer_engine)
    if at.pp == layout.pp - 1:
        found.append(_column(FINAL_NORM, shape.hidden_size, "decoder.final_layernorm.weight"))
        found.append(_vocab_rows(shape, layout, at, LM_HEAD, "output_layer.weight"))
    return found


def _column(name: str, size: int, param: str) -> Shard:
    return Shard(name, (0, size), (0, 1), param, (0, 0))


def _vocab_rows(shape: ModelShape, layout: TrainLayout, at: RankCoords, name: str, param: str) -> Shard:
    per_rank = layout.padded_vocab(shape.vocab_size) // layout.tp
    rows = intersect((at.tp * per_rank, (at.tp + 1) * per_rank), (0, shape.vocab_size))
    return Shard(name, rows, (0, shape.hidden_size), param, (0, 0))


def _attention(shape: ModelShape, layout: TrainLayout, at: RankCoords, source: str, param: str) -> list[Shard]:
    heads_per_group, groups = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads // layout.tp
    q_rows, kv_rows, hidden = heads_per_group * shape.head_dim, shape.head_dim, (0, shape.hidden_size)
    found: list[Shard] = []
    for local in range(groups):
        group, row = at.tp * groups + local, local * (q_rows + 2 * kv_rows)
        for letter, size in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            rows = (group * size, (group + 1) * size)
            found.append(Shard(f"{source}{letter}_proj.weight", rows, hidden, param + "linear_qkv.weight", (row, 0)))
            row += size
    cols = (at.tp * groups * q_rows, (at.tp + 1) * groups * q_rows)
    found.append(Shard(source + "o_proj.weight", hidden, cols, param + "linear_proj.weight", (0, 0)))
    for letter in "qk":
        found.append(_column(f"{source}{letter}_norm.weight", shape.head_dim, f"{param}{letter}_layernorm.weight"))
    return found


def _norms_and_router(shape: ModelShape, source: str, param: str, transformer_engine: bool) -> list[Shard]:
    fused, local = "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    hidden = shape.hidden_size
    return [
        _column(source + "input_layernorm.weight", hidden, param + (fused if transformer_engine else local)),
        _column(source + "post_attention_layernorm.weight", hidden, param + "pre_mlp_layernorm.weight"),
        Shard(source + "mlp.gate.weight", (0, shape.num_experts), (0, hidden), param + "mlp.router.weight", (0, 0)),
    ]


def _expert_param(param: str, transformer_engine: bool) -> Callable[[str, int], str]:
    if transformer_engine:
        return lambda linear, expert: f"{param}{linear}.weight{expert}"
    return lambda linear, expert: f"{param}local_experts.{expert}.{linear}.weight"


def _experts(
    shape: ModelShape, layout: TrainLayout, at: RankCoords, layer: int, param: str, transformer_engine: bool
) -> list[Shard]:
    experts, ffn, hidden = shape.num_experts // layout.ep, shape.moe_ffn_size // layout.etp, (0, shape.hidden_size)
    part: Range = (at.etp * ffn, (at.etp + 1) * ffn)
    param_of = _expert_param(param, transformer_engine)
    found: list[Shard] = []
    for local in range(experts):
        source = expert_prefix(layer, at.ep * experts + local)
        fc1, fc2 = param_of("linear_fc1", local), param_of("linear_fc2", local)
        found.append(Shard(source + "gate_proj.weight", part, hidden, fc1, (0, 0)))
        found.append(Shard(source + "up_proj.weight", part, hidden, fc1, (ffn, 0)))
        found.append(Shard(source + "down_proj.weight", hidden, part, fc2, (0, 0)))
    return found
