"""The model families: a row for each architecture of transformers says what it is in the terms of ModelShape.

docs/models.md shows how a family is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.model.hf_values import integer, optional_integer
from megarl.model.shape import MlaShape

# ModelShape's field -> the keys of config.json, of which transformers has several
_EXPERT_INTEGERS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_ffn_size": ("moe_intermediate_size",),
}
_MLA_INTEGERS = {
    "kv_lora_rank": ("kv_lora_rank",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "v_dim": ("v_head_dim",),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    fields: reads the fields of ModelShape that not every family has, from the file's content and the fields that every
    family has. constants: fields of ModelShape that the architecture decides and no key of config.json. has_experts:
    some layers have routed experts. has_grouped_router: DeepSeek-V3's, which chooses groups of experts first and
    normalises sigmoid scores. has_yarn: rotary positions may be YaRN's.
    """

    fields: Callable[[Path, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    has_grouped_router: bool = False
    has_yarn: bool = False


def dense(file: Path, config: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Grouped-query attention and one gated MLP in every layer."""
    return {
        **_grouped_query(file, config, common),
        "num_dense_layers": common["num_layers"],
        "ffn_size": integer(file, config, ("intermediate_size",)),
    }


def mixture(file: Path, config: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Grouped-query attention and routed experts in every layer."""
    experts = {name: integer(file, config, keys) for name, keys in _EXPERT_INTEGERS.items()}
    return _grouped_query(file, config, common) | experts


def latent_mixture(
    file: Path, config: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Multi-head latent attention, dense layers first, then routed and shared experts, then multi-token prediction."""
    mla = {name: integer(file, config, keys) for name, keys in _MLA_INTEGERS.items()}
    q_lora_rank = optional_integer(file, config, "q_lora_rank")
    return {
        "num_kv_heads": integer(file, config, ("num_attention_heads",)),
        "head_dim": mla["v_dim"],
        **{name: integer(file, config, keys) for name, keys in _EXPERT_INTEGERS.items()},
        "num_dense_layers": integer(file, config, ("first_k_dense_replace",), 0, least=0),
        "ffn_size": integer(file, config, ("intermediate_size",)),
        "num_shared_experts": integer(file, config, ("n_shared_experts",), 0, least=0),
        "num_mtp_layers": integer(file, config, ("num_nextn_predict_layers",), 0, least=0),
        "mla": MlaShape(q_lora_rank=q_lora_rank, **mla),
    }


def _grouped_query(
    file: Path, config: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    width, rest = divmod(common["hidden_size"], common["num_heads"])
    return {
        "num_kv_heads": integer(file, config, ("num_key_value_heads",), common["num_heads"]),
        "head_dim": integer(file, config, ("head_dim",), None if rest else width),
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
