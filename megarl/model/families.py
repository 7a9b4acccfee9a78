"""The model families: a row for each architecture of transformers says what it is in the terms of ModelShape.

docs/models.md shows how a family is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.model.hf_values import ConfigFile
from megarl.model.shape import MlaShape

_MLA_INTEGERS = {  # MlaShape's field -> the key of config.json
    "kv_lora_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    fields: reads the fields of ModelShape that not every family has, from the file and the fields that every family
    has. constants: fields of ModelShape that the architecture decides and no key of config.json. has_experts: some
    layers have routed experts. has_grouped_router: DeepSeek-V3's, which chooses groups of experts first and normalises
    sigmoid scores. has_yarn: rotary positions may be YaRN's. rotary_share: of each head's width, what rotary positions
    turn where config.json has no partial_rotary_factor; None: the family turns all of it. own_keys: the keys that
    `fields` reads, and that other families have with one value alone.
    """

    fields: Callable[[ConfigFile, Mapping[str, int]], dict[str, Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    has_grouped_router: bool = False
    has_yarn: bool = False
    rotary_share: float | None = None
    own_keys: frozenset[str] = frozenset()


def dense(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Grouped-query attention and one gated MLP in every layer."""
    return {
        **_grouped_query(config, common),
        "num_dense_layers": common["num_layers"],
        "ffn_size": config.integer("intermediate_size"),
    }


def mixture(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Grouped-query attention and routed experts in every layer."""
    return _grouped_query(config, common) | _experts(config)


def latent_mixture(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Multi-head latent attention, dense layers first, then routed and shared experts, then multi-token prediction."""
    mla = {name: config.integer(key) for name, key in _MLA_INTEGERS.items()}
    return {
        "num_kv_heads": common["num_heads"],
        "head_dim": mla["v_dim"],
        **_sparse_after_dense(config, default_dense=0),
        "mla": MlaShape(config.optional_integer("q_lora_rank"), **mla),
    }


def glm_mixture(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Grouped-query attention with biases, and layers as those of `latent_mixture`.

    GLM-4.5 has norms of queries and keys, GLM-4.5-Air has none.
    """
    return {
        **_grouped_query(config, common),
        **_sparse_after_dense(config, default_dense=1),
        "qk_norm": config.truth("use_qk_norm"),
        "qkv_bias": config.truth("attention_bias"),
    }


def glm_latent_mixture(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """As `latent_mixture`; transformers 5 names the kind of each layer's MLP in place of the number of dense ones."""
    kinds = config.texts("mlp_layer_types")[: common["num_layers"]]  # MTP layers follow
    if not kinds:
        num_dense = config.integer("first_k_dense_replace", default=1, least=0)
        return latent_mixture(config, common) | {"num_dense_layers": num_dense}
    num_dense = kinds.count("dense")
    if kinds != ["dense"] * num_dense + ["sparse"] * (common["num_layers"] - num_dense):
        problem = f"mlp_layer_types is {kinds!r:.60}"
        raise config.error(problem, "use a checkpoint whose dense layers are its first ones")
    return latent_mixture(config, common) | {"num_dense_layers": num_dense}


def _sparse_after_dense(config: ConfigFile, *, default_dense: int) -> dict[str, int]:
    """Dense layers, then routed and shared experts, then multi-token prediction."""
    return {
        **_experts(config),
        "num_dense_layers": config.integer("first_k_dense_replace", default=default_dense, least=0),
        "ffn_size": config.integer("intermediate_size"),
        "num_shared_experts": config.integer("n_shared_experts", default=0, least=0),
        "num_mtp_layers": config.integer("num_nextn_predict_layers", default=0, least=0),
    }


def _experts(config: ConfigFile) -> dict[str, int]:
    return {
        "num_experts": config.integer("num_experts", "n_routed_experts", "num_local_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "moe_ffn_size": config.integer("moe_intermediate_size"),
    }


def _grouped_query(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    width, remainder = divmod(common["hidden_size"], common["num_heads"])
    return {
        "num_kv_heads": config.integer("num_key_value_heads", default=common["num_heads"]),
        "head_dim": config.integer("head_dim", default=None if remainder else width),
    }


FAMILIES: dict[str, Family] = {  # by the name of the architecture; Kimi-K2 names DeepSeek-V3's
    "Qwen3MoeForCausalLM": Family(mixture, has_experts=True, has_yarn=True),
    "DeepseekV3ForCausalLM": Family(
        latent_mixture,
        {"router_bias": True, "qk_norm": False},
        has_experts=True,
        has_grouped_router=True,
        has_yarn=True,
    ),
    "Glm4MoeForCausalLM": Family(  # GLM-4.5, 4.5-Air, 4.6, 4.7
        glm_mixture,
        {"router_bias": True, "has_wide_router": True, "splits_shared": True},
        has_experts=True,
        has_grouped_router=True,
        rotary_share=0.5,
        own_keys=frozenset({"attention_bias"}),
    ),
    "Glm4MoeLiteForCausalLM": Family(  # GLM-4.7-Flash
        glm_latent_mixture,
        {
            "router_bias": True,
            "qk_norm": False,
            "has_wide_router": True,
            "splits_shared": True,
        },
        has_experts=True,
        has_grouped_router=True,
    ),
    "Qwen2ForCausalLM": Family(dense, {"qk_norm": False, "qkv_bias": True}, has_yarn=True),
    "Qwen3ForCausalLM": Family(dense, has_yarn=True),
    "LlamaForCausalLM": Family(dense, {"qk_norm": False}, has_yarn=True),
}
