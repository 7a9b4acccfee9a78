"""The logical tensors of a model: the names and shapes of its HF checkpoint.

Families: Qwen3MoeForCausalLM, DeepseekV3ForCausalLM (V3, R1, Kimi-K2), Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM,
Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM. The multi-token prediction layers follow the decoder's layers
(DeepSeek-V3's README_WEIGHTS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.model.shape import SCORE, ModelShape

Size = tuple[int, int, int]  # items, rows, columns
STACK = "{}"  # in a name: the placeholder of the item's number
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
Named = Iterator[tuple[str, Size]]


def tensors(shape: ModelShape) -> dict[str, Size]:
    """Every logical tensor: name -> (items, rows, columns); a layer's experts of one kind are one stack."""
    sizes_by_name = {
        EMBEDDING: (1, shape.vocab_size, shape.hidden_size),
        FINAL_NORM: _vector(shape.hidden_size),
    }
    if shape.num_labels:
        sizes_by_name[SCORE] = (1, shape.num_labels, shape.hidden_size)
    elif not shape.tied:
        sizes_by_name[LM_HEAD] = (1, shape.vocab_size, shape.hidden_size)
    for layer in range(shape.num_layers + shape.num_mtp_layers):
        sizes_by_name |= dict(_layer(shape, layer))
    for index in range(shape.num_mtp_layers):
        sizes_by_name |= dict(_mtp(shape, mtp_prefix(shape, index)))
    return sizes_by_name


def aliases(shape: ModelShape) -> dict[str, str]:
    """Tensors that a checkpoint has twice: name of the copy -> name of the original."""
    originals_by_copy = {}
    for index in range(shape.num_mtp_layers):
        prefix = mtp_prefix(shape, index)
        originals_by_copy[prefix + "embed_tokens.weight"] = EMBEDDING
        originals_by_copy[prefix + "shared_head.head.weight"] = EMBEDDING if shape.tied else LM_HEAD
    return originals_by_copy


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape in the checkpoint's files, where items of stacks are separate and vectors have one dimension."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for name, (items, rows, cols) in tensors(shape).items():
        if is_vector(name):
            file_shape = (rows,)
        else:
            file_shape = (rows, cols)
        shapes_by_name |= {name.format(item): file_shape for item in range(items)}
    return shapes_by_name


def is_vector(name: str) -> bool:
    """Whether the checkpoint's tensor has one dimension: norms and biases."""
    return name.endswith(("norm.weight", "bias"))


def is_projection(name: str) -> bool:
    """Whether the tensor is the weight of a linear layer that fp8 and int4 checkpoints quantise.

    Those of attention, MLPs and experts, not the router, the embedding, the output layer and MTP's eh_proj.
    """
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith(
        ".eh_proj.weight"
    )


def layer_prefix(layer: int) -> str:
    """The prefix of the names of a decoder layer's tensors."""
    return f"model.layers.{layer}."


def mtp_prefix(shape: ModelShape, index: int) -> str:
    """The prefix of the names of a multi-token prediction layer's tensors."""
    return layer_prefix(shape.num_layers + index)


def expert_stack(layer: int, kind: str) -> str:
    """The stack of all experts' gate_proj, up_proj or down_proj of a layer."""
    return f"{layer_prefix(layer)}mlp.experts.{STACK}.{kind}.weight"


def _vector(size: int) -> Size:
    return 1, size, 1


def _layer(shape: ModelShape, layer: int) -> Named:
    prefix = layer_prefix(layer)
    hidden = shape.hidden_size
    yield prefix + "input_layernorm.weight", _vector(hidden)
    yield prefix + "post_attention_layernorm.weight", _vector(hidden)
    attention = prefix + "self_attn."
    yield from ATTENTION[shape.attention_map](shape, attention)
    if shape.is_dense(layer):
        yield from _mlp(prefix + "mlp.", hidden, shape.ffn_size)
        return
    yield prefix + "mlp.gate.weight", (1, shape.num_experts, hidden)
    if shape.router_bias:
        yield prefix + "mlp.gate.e_score_correction_bias", _vector(shape.num_experts)
    if shape.num_shared_experts:
        yield from _mlp(
            prefix + "mlp.shared_experts.", hidden, shape.num_shared_experts * shape.moe_ffn_size
        )
    for kind in ("gate_proj", "up_proj"):
        yield expert_stack(layer, kind), (shape.num_experts, shape.moe_ffn_size, hidden)
    yield expert_stack(layer, "down_proj"), (shape.num_experts, hidden, shape.moe_ffn_size)


def _attention(shape: ModelShape, prefix: str) -> Named:
    sizes = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    for letter, heads in sizes.items():
        yield f"{prefix}{letter}_proj.weight", (1, heads * shape.head_dim, shape.hidden_size)
        if shape.qkv_bias:
            yield f"{prefix}{letter}_proj.bias", _vector(heads * shape.head_dim)
    yield prefix + "o_proj.weight", (1, shape.hidden_size, shape.num_heads * shape.head_dim)
    if shape.qk_norm:
        yield prefix + "q_norm.weight", _vector(shape.head_dim)
        yield prefix + "k_norm.weight", _vector(shape.head_dim)


def _latent_attention(shape: ModelShape, prefix: str) -> Named:
    mla = shape.mla
    heads = shape.num_heads
    hidden = shape.hidden_size
    assert mla is not None
    q_rows = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_lora_rank:
        yield prefix + "q_a_proj.weight", (1, mla.q_lora_rank, hidden)
        yield prefix + "q_a_layernorm.weight", _vector(mla.q_lora_rank)
        yield prefix + "q_b_proj.weight", (1, q_rows, mla.q_lora_rank)
    else:
        yield prefix + "q_proj.weight", (1, q_rows, hidden)
    yield prefix + "kv_a_proj_with_mqa.weight", (1, mla.kv_lora_rank + mla.rope_dim, hidden)
    yield prefix + "kv_a_layernorm.weight", _vector(mla.kv_lora_rank)
    yield prefix + "kv_b_proj.weight", (1, heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)
    yield prefix + "o_proj.weight", (1, hidden, heads * mla.v_dim)


# The tensors of a layer's attention, by ModelShape.attention_map.
ATTENTION: dict[str, Callable[[ModelShape, str], Named]] = {
    "grouped_query": _attention,
    "latent": _latent_attention,
}


def _mlp(prefix: str, hidden: int, width: int) -> Named:
    yield prefix + "gate_proj.weight", (1, width, hidden)
    yield prefix + "up_proj.weight", (1, width, hidden)
    yield prefix + "down_proj.weight", (1, hidden, width)


def _mtp(shape: ModelShape, prefix: str) -> Named:
    hidden = shape.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}{norm}.weight", _vector(hidden)
    yield prefix + "eh_proj.weight", (1, hidden, 2 * hidden)
