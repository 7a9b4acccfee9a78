"""GLM-4.5, 4.5-Air, 4.6 and 4.7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import Experts, Layer, usual_attention, usual_mlp
from megarl.model.families.family import Family, read_heads, read_sparse_after_dense
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

# SGLang has its routers in float32 (models/glm4_moe.py)
GLM_EXPERTS = Experts(engine_router_dtype="float32")


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """GLM-4.5 has norms of queries and keys, GLM-4.5-Air has none."""
    return {
        **read_heads(config, common),
        **read_sparse_after_dense(config, default_dense=1),
        "qk_norm": config.truth("use_qk_norm"),
        "qkv_bias": config.truth("attention_bias"),
    }


def layer(shape: ModelShape, number: int) -> Layer:
    """The usual blocks, with wide routers on the engines' side."""
    return Layer(usual_attention(shape), usual_mlp(shape, number, GLM_EXPERTS))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    read,
    models="GLM-4.5, 4.5-Air, 4.6, 4.7",
    attention="grouped-query, biases of queries, keys and values; rotary positions turn half of each head; "
    "norms of queries and keys in all but Air",
    layers="as DeepSeek-V3's, with one group of experts",
    constants={"router_bias": True},
    layer=layer,
    has_experts=True,
    has_sigmoid_router=True,
    rotary_share=0.5,
    own_keys=frozenset({"attention_bias"}),
    splits_shared=True,
)
