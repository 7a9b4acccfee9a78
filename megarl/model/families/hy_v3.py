"""Hunyuan HY-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import Experts, Layer, usual_attention, usual_mlp
from megarl.model.families.family import Family, read_experts, read_heads
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

_EXPERTS = Experts(
    router="router.gate.weight",
    router_param="gate.weight",
    bias="expert_bias",
    shared="shared_mlp",
    engine_router_dtype="float32",
)


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """SGLang has norms of queries and keys, and normalises the weights of experts, only where the file says so."""
    hint = "use the config.json that was published with the weights"
    for key in ("qk_norm", "route_norm"):
        if not config.truth(key):
            raise config.error(f"{key} is not true", hint)
    if config.content.get("use_qk_norm", True) is not True:  # SGLang prefers it to qk_norm
        raise config.error("use_qk_norm is not true", hint)
    return {
        **read_heads(config, common),
        **read_experts(config),
        "num_dense_layers": config.integer("first_k_dense_replace", least=0),
        "ffn_size": config.integer("intermediate_size"),
        "num_shared_experts": config.integer("num_shared_experts", default=0, least=0),
    }


def facts(config: ConfigFile) -> dict[str, Any]:
    """The scale of the routed experts' sum has a key of its own."""
    return {"routed_scaling": config.number("router_scaling_factor", 1.0, most=1e6)}


def layer(shape: ModelShape, number: int) -> Layer:
    """The usual blocks, with names of their own."""
    return Layer(usual_attention(shape), usual_mlp(shape, number, _EXPERTS))


HY_V3 = Family(
    "HYV3ForCausalLM",
    read,
    models="Hunyuan HY-V3 (its MTP layer is left out)",
    attention="grouped-query, norms of queries and keys",
    layers="as DeepSeek-V3's, with one group of experts",
    constants={"router_bias": True},
    layer=layer,
    has_experts=True,
    has_sigmoid_router=True,
    splits_shared=True,
    facts=facts,
    engine_lacks=frozenset({"dp", "deepep", "chosen_experts"}),
)
