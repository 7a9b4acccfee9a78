"""Qwen1.5-MoE and Qwen2-MoE: experts in every layer, and shared ones with a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import Experts, Layer, attention, experts
from megarl.model.families.family import Family, read_experts, read_heads
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

EXPERTS = Experts(shared="shared_expert", shared_gate="shared_expert_gate.weight")


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """The shared experts are one MLP, as wide as some routed experts together."""
    sizes = read_experts(config)
    key = "shared_expert_intermediate_size"
    number, rest = divmod(config.integer(key), sizes["moe_ffn_size"])
    if rest or not number:
        hint = "use a checkpoint where it is a multiple of moe_intermediate_size"
        raise config.error(f"{key} is {config.integer(key)}", hint)
    return {**read_heads(config, common), **sizes, "num_shared_experts": number}


def layer(shape: ModelShape, number: int) -> Layer:
    """All layers are alike."""
    return Layer(attention(shape), experts(shape, EXPERTS))


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
