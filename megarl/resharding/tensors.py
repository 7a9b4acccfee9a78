"""The logical tensors of the Qwen3-MoE family: the names and shapes of its HF checkpoint."""

from __future__ import annotations

from megarl.resharding.shards import EMBEDDING, LM_HEAD
from megarl.types import ModelShape

FINAL_NORM = "model.norm.weight"


def expert_prefix(layer: int, expert: int) -> str:
    """Start of the names of one expert's gate_proj, up_proj and down_proj."""
    return f"model.layers.{layer}.mlp.experts.{expert}."


def layer_tensors(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one decoder layer, experts included."""
    prefix, hidden, ffn = f"model.layers.{layer}.", shape.hidden_size, shape.moe_ffn_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "self_attn.q_proj.weight": (q_rows, hidden),
        prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
        prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
        prefix + "self_attn.o_proj.weight": (hidden, q_rows),
        prefix + "self_attn.q_norm.weight": (shape.head_dim,),
        prefix + "self_attn.k_norm.weight": (shape.head_dim,),
        prefix + "post_attention_layernorm.weight": (hidden,),
        prefix + "mlp.gate.weight": (shape.num_experts, hidden),
    }
    for expert in range(shape.num_experts):
        name = expert_prefix(layer, expert)
        found[name + "gate_proj.weight"] = (ffn, hidden)
        found[name + "up_proj.weight"] = (ffn, hidden)
        found[name + "down_proj.weight"] = (hidden, ffn)
    return found


def model_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint with untied embeddings."""
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        found |= layer_tensors(shape, layer)
    return found | {FINAL_NORM: (shape.hidden_size,), LM_HEAD: (shape.vocab_size, shape.hidden_size)}
