"""Where an engine rank keeps each part of the model: SGLang 0.5.21's Qwen3MoeForCausalLM, unquantised.

Facts from sglang/srt: `qkv_proj` holds the rank's query heads, then its key heads, then its value heads, and with fewer
key/value heads than ranks each is replicated on neighbours (layers/linear.py); `w13_weight` is [experts, gate; up,
hidden] (layers/moe/fused_moe_triton/layer.py); the vocabulary is padded to 64, or to 64 x TP where TP does not divide
that (layers/vocab_parallel_embedding.py); the TP rank is expert rank x (TP / EP) + rank inside the expert
(runtime_context.py). On a CPU, SGLang pads the heads where TP does not divide the key/value heads, and an expert's
width where 32 x TP does not divide it (configs/update_config.py): there is no map of that, `verify_params` refuses it.
"""

from __future__ import annotations

from megarl.parallel.layout import EngineLayout
from megarl.resharding.shards import EMBEDDING, LM_HEAD, Range, Shard, intersect
from megarl.resharding.tensors import FINAL_NORM, expert_prefix, layer_tensors
from megarl.types import ModelShape

VOCAB_MULTIPLE = 64


def shards(shape: ModelShape, engine: EngineLayout, tp_rank: int) -> list[Shard]:
    """Every rectangle that rank `tp_rank` of an engine holds."""
    found = [_vocab_rows(shape, engine, tp_rank, EMBEDDING)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        found += _attention(shape, engine, tp_rank, prefix + "self_attn.")
        found += _replicated(shape, layer)
        found += _experts(shape, engine, tp_rank, layer)
    found.append(Shard(FINAL_NORM, (0, shape.hidden_size), (0, 1), FINAL_NORM, (0, 0)))
    found.append(_vocab_rows(shape, engine, tp_rank, LM_HEAD))
    return found


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all TP ranks."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp:
        padded = -(-vocab_size // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp
    return padded


def _vocab_rows(shape: ModelShape, engine: EngineLayout, tp_rank: int, name: str) -> Shard:
    per_rank = padded_vocab(shape.vocab_size, engine.tp) // engine.tp
    rows = intersect((tp_rank * per_rank, (tp_rank + 1) * per_rank), (0, shape.vocab_size))
    return Shard(name, rows, (0, shape.hidden_size), name, (0, 0))


def _attention(shape: ModelShape, engine: EngineLayout, tp_rank: int, prefix: str) -> list[Shard]:
    q_rows = shape.num_heads // engine.tp * shape.head_dim
    kv_rows = max(1, shape.num_kv_heads // engine.tp) * shape.head_dim
    replicas = max(1, engine.tp // shape.num_kv_heads)
    hidden, row = (0, shape.hidden_size), 0
    found: list[Shard] = []
    kv_part = tp_rank // replicas
    for letter, part, size in (("q", tp_rank, q_rows), ("k", kv_part, kv_rows), ("v", kv_part, kv_rows)):
        rows = (part * size, (part + 1) * size)
        found.append(Shard(f"{prefix}{letter}_proj.weight", rows, hidden, prefix + "qkv_proj.weight", (row, 0)))
        row += size
    cols = (tp_rank * q_rows, (tp_rank + 1) * q_rows)
    found.append(Shard(prefix + "o_proj.weight", hidden, cols, prefix + "o_proj.weight", (0, 0)))
    return found


def _replicated(shape: ModelShape, layer: int) -> list[Shard]:
    """Norms and router: whole on every rank, under the checkpoint's own names."""
    found = []
    for name, size in layer_tensors(shape, layer).items():
        if len(size) == 1 or name.endswith(".mlp.gate.weight"):
            found.append(Shard(name, (0, size[0]), (0, size[1] if len(size) > 1 else 1), name, (0, 0)))
    return found


def _experts(shape: ModelShape, engine: EngineLayout, tp_rank: int, layer: int) -> list[Shard]:
    expert_rank, part_rank = divmod(tp_rank, engine.moe_tp)
    experts, ffn, hidden = shape.num_experts // engine.ep, shape.moe_ffn_size // engine.moe_tp, shape.hidden_size
    part: Range = (part_rank * ffn, (part_rank + 1) * ffn)
    prefix = f"model.layers.{layer}.mlp.experts."
    found: list[Shard] = []
    for local in range(experts):
        source, row = expert_prefix(layer, expert_rank * experts + local), local * 2 * ffn
        found.append(Shard(source + "gate_proj.weight", part, (0, hidden), prefix + "w13_weight", (row, 0)))
        found.append(Shard(source + "up_proj.weight", part, (0, hidden), prefix + "w13_weight", (row + ffn, 0)))
        found.append(Shard(source + "down_proj.weight", (0, hidden), part, prefix + "w2_weight", (local * hidden, 0)))
    return found
