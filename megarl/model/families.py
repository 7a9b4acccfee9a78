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
    sigmoid scores. has_yarn: rotary positions may be YaRN's.
    """

    fields: Callable[[ConfigFile, Mapping[str, int]], dict[str, Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    has_grouped_router: bool = False
    has_yarn: bool = False


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
        **_experts(config),
        "num_dense_layers": config.integer("first_k_dense_replace", default=0, least=0),
        "ffn_size": config.integer("intermediate_size"),
        "num_shared_experts": config.integer("n_shared_experts", default=0, least=0),
        "num_mtp_layers": config.integer("num_nextn_predict_layers", default=0, least=0),
        "mla": MlaShape(config.optional_integer("q_lora_rank"), **mla),
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
    "Qwen3MoeForCausalLM": Family(mixture, has_experts=True),
    "DeepseekV3ForCausalLM": Family(
        latent_mixture,
        {"router_bias": True, "qk_norm": False},
        has_experts=True,
        has_grouped_router=True,
        has_yarn=True,
    ),
    "Qwen2ForCausalLM": Family(dense, {"qk_norm": False, "qkv_bias": True}),
    "Qwen3ForCausalLM": Family(dense),
    "LlamaForCausalLM": Family(dense, {"qk_norm": False}),
}
