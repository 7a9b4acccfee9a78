"""Qwen1.5-MoE and Qwen2-MoE: experts in every layer, and shared ones with a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import GATED_SHARED_EXPERTS, Layer, attention, experts
from megarl.model.families.family import Family, read_experts, read_gated_shared, read_heads
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """The shared experts are one MLP, as wide as some routed experts together."""
    sizes = read_experts(config)
    number = read_gated_shared(config, sizes["moe_ffn_size"])
    if not config.content.get("qkv_bias", True):
        raise config.error("qkv_bias is false", "use a checkpoint where it is true")
    return {**read_heads(config, common), **sizes, "num_shared_experts": number}


def layer(shape: ModelShape, number: int) -> Layer:
    """All layers are alike."""
    return Layer(attention(shape), experts(shape, GATED_SHARED_EXPERTS))


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    read,
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    attention="grouped-query, biases of queries, keys and values",
    layers="routed experts, and shared ones with a gate",
    constants={"qk_norm": False, "qkv_bias": True},
    layer=layer,
    megatron={"moe_shared_expert_gate": True},
    splits_shared=True,
    has_experts=True,
)
