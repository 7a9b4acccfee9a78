"""The row of a model family, and how the usual keys of a config.json are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.model.families.blocks import Layer, usual_layer
from megarl.model.families.mtp_frame import MtpFrame
from megarl.model.families.wrapper import Wrapper
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import MlaShape, ModelShape

Lacking = Literal["dp", "group_head", "deepep", "chosen_experts", "other_dtype"]
_MLA_INTEGERS = {  # MlaShape's field -> the key of config.json
    "kv_lora_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


def no_facts(config: ConfigFile) -> dict[str, Any]:
    """All fields of HfFacts have the usual keys."""
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture: what its config.json says, its layers on each side, and what it decides without a key.

    architecture: the class in transformers and in SGLang. models, attention, layers: the published models, and words
    for the table of docs/models.md. read: makes the fields of ModelShape that not every family has, of the file and of
    the fields that every family has. constants: fields of ModelShape that the architecture decides. layer: the blocks
    of a layer, by its number, on which multi-token prediction layers count on. mtp: what is around those layers.
    megatron: fields of Megatron's TransformerConfig that differ from the usual ones.

    has_experts: some layers have routed experts. has_sigmoid_router: DeepSeek-V3's, which may choose groups of experts
    first and normalises sigmoid scores. has_yarn: rotary positions may be YaRN's. rotary_share: of each head's width,
    what rotary positions turn where config.json has no partial_rotary_factor; None: the family turns all of it.
    own_keys: the keys that `read` reads, and that other families have with one value alone. splits_shared: SGLang
    splits the shared experts over all ranks, but with DeepEP, whatever its environment says (SGLANG_SHARED_EXPERT_TP1).
    facts: the fields of HfFacts that config.json says by other keys. engine_lacks: what SGLang has not for it: DP
    attention, an output layer for each group of it, DeepEP, a record of the experts that tokens went to, another type
    than config.json's.
    has_wide_norms: queries and keys are normalised over all heads at once. wrapper: the checkpoint's form, where it has
    more parts than the language model; they are not trained.
    """

    architecture: str
    read: Callable[[ConfigFile, Mapping[str, int]], dict[str, Any]]
    models: str = ""
    attention: str = "grouped-query"
    layers: str = "dense"
    constants: Mapping[str, Any] = field(default_factory=dict)
    layer: Callable[[ModelShape, int], Layer] = usual_layer
    mtp: MtpFrame = MtpFrame()
    megatron: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    has_sigmoid_router: bool = False
    has_yarn: bool = False
    rotary_share: float | None = None
    own_keys: frozenset[str] = frozenset()
    splits_shared: bool = False
    facts: Callable[[ConfigFile], dict[str, Any]] = no_facts
    engine_lacks: frozenset[Lacking] = frozenset()
    has_wide_norms: bool = False
    wrapper: Wrapper | None = None


def read_dense(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Grouped-query attention and one gated MLP in every layer."""
    return {
        **read_heads(config, common),
        "num_dense_layers": common["num_layers"],
        "ffn_size": config.integer("intermediate_size"),
    }


def read_sparse(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Grouped-query attention and routed experts in every layer."""
    return read_heads(config, common) | read_experts(config)


def read_latent(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Multi-head latent attention, dense layers first, then routed and shared experts, then multi-token prediction."""
    mla = {name: config.integer(key) for name, key in _MLA_INTEGERS.items()}
    return {
        "num_kv_heads": common["num_heads"],
        "head_dim": mla["v_dim"],
        **read_sparse_after_dense(config, default_dense=0),
        "mla": MlaShape(config.optional_integer("q_lora_rank"), **mla),
    }


def read_sparse_after_dense(config: ConfigFile, *, default_dense: int) -> dict[str, int]:
    """Dense layers, then routed and shared experts, then multi-token prediction."""
    return {
        **read_experts(config),
        "num_dense_layers": config.integer("first_k_dense_replace", default=default_dense, least=0),
        "ffn_size": config.integer("intermediate_size"),
        "num_shared_experts": config.integer("n_shared_experts", default=0, least=0),
        "num_mtp_layers": MtpFrame().read(config),
    }


def read_experts(config: ConfigFile) -> dict[str, int]:
    """Routed experts."""
    return {
        "num_experts": config.integer("num_experts", "n_routed_experts", "num_local_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "moe_ffn_size": config.integer("moe_intermediate_size"),
    }


def read_experts_as_wide_as_mlps(config: ConfigFile) -> dict[str, Any]:
    """Routed experts whose width has the key that other families have for that of an MLP."""
    return {
        "num_experts": config.integer("num_local_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "moe_ffn_size": config.integer("intermediate_size"),
    }


def read_gated_shared(config: ConfigFile, expert_width: int) -> int:
    """How many routed experts are as wide as the shared one. Raises UserError where that is no whole number."""
    key = "shared_expert_intermediate_size"
    width = config.integer(key)
    if width % expert_width:
        hint = f"use a checkpoint where it is a multiple of moe_intermediate_size ({expert_width})"
        raise config.error(f"{key} is {width}", hint)
    return width // expert_width


def read_heads(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """The key/value heads, and the width of all heads."""
    width, remainder = divmod(common["hidden_size"], common["num_heads"])
    return {
        "num_kv_heads": config.integer("num_key_value_heads", default=common["num_heads"]),
        "head_dim": config.integer("head_dim", default=None if remainder else width),
    }
