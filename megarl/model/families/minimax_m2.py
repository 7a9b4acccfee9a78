"""MiniMax-M2, M2.1 and M2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import (
    BLOCK_SPARSE_KINDS,
    BLOCK_SPARSE_MOE,
    Experts,
    Layer,
    attention,
    experts,
)
from megarl.model.families.family import Family, read_experts_as_wide_as_mlps, read_heads
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

_EXPERTS = Experts(
    bias="e_score_correction_bias", kinds=BLOCK_SPARSE_KINDS, engine_router_dtype="float32"
)
_READ_BY_SGLANG = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """SGLang has norms and the router's bias only where the file says so."""
    for key, value in _READ_BY_SGLANG.items():
        if config.content.get(key) != value:
            problem = f"{key} is {config.content.get(key)!r:.60}"
            raise config.error(problem, f"use a checkpoint where it is {value!r}")
    if config.content.get("qk_norm_type", "per_layer") != "per_layer":
        raise config.error(
            f"qk_norm_type is {config.content['qk_norm_type']!r:.60}",
            "use a checkpoint where it is per_layer",
        )
    return read_heads(config, common) | read_experts_as_wide_as_mlps(config)


def facts(config: ConfigFile) -> dict[str, Any]:
    """Rotary positions turn the first `rotary_dim` of each head."""
    turned = config.integer("rotary_dim")
    width = config.integer("head_dim")
    if turned > width or turned % 2:
        problem = f"rotary_dim is {turned}, and head_dim {width}"
        raise config.error(problem, "use the config.json that was published with the weights")
    return {"rotary_share": turned / width}


def layer(shape: ModelShape, number: int) -> Layer:
    """Experts in every layer; norms over all heads at once."""
    return Layer(attention(shape, wide_norms=True), experts(shape, _EXPERTS, BLOCK_SPARSE_MOE))


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    read,
    models="MiniMax-M2, M2.1, M2.5",
    attention="grouped-query, norms of queries and keys over all heads at once; "
    "rotary positions turn half of each head",
    layers="routed experts, chosen by sigmoid scores with a bias",
    constants={"router_bias": True},
    layer=layer,
    # with it Megatron sums the gradients of the norms over TP, whose ranks have weights of their own here
    megatron={"qk_layernorm": False},
    engine_lacks=frozenset({"group_head", "chosen_experts"}),
    has_experts=True,
    has_sigmoid_router=True,
    rotary_share=0.5,
    has_wide_norms=True,
    facts=facts,
)
