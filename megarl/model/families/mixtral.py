"""Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import Experts, Layer, Modules, attention, experts
from megarl.model.families.family import Family, read_heads
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

BLOCK_SPARSE = Modules("block_sparse_moe.", "mlp.", "block_sparse_moe.")
KINDS = ("w1", "w3", "w2")  # an expert's gate, up and down projection
_EXPERTS = Experts(kinds=KINDS)


def read_experts_of_all_layers(config: ConfigFile) -> dict[str, Any]:
    """Experts whose width is that of an MLP."""
    return {
        "num_experts": config.integer("num_local_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "moe_ffn_size": config.integer("intermediate_size"),
    }


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """A window of attention is refused: published files of Mixtral have none."""
    if config.content.get("sliding_window") is not None:
        problem = f"sliding_window is {config.content['sliding_window']!r:.60}"
        raise config.error(problem, "use a checkpoint where it is null")
    heads = read_heads(config, common)
    width, remainder = divmod(common["hidden_size"], common["num_heads"])
    if remainder or heads["head_dim"] != width:
        problem = f"head_dim is {heads['head_dim']}, and SGLang's heads are hidden_size / num_attention_heads wide"
        raise config.error(problem, f"use a checkpoint where it is {width}")
    return heads | read_experts_of_all_layers(config)


def facts(config: ConfigFile) -> dict[str, Any]:
    """Weights of a token's experts always sum to 1."""
    return {"norm_topk_prob": True}


def layer(shape: ModelShape, number: int) -> Layer:
    """Experts in every layer."""
    return Layer(attention(shape), experts(shape, _EXPERTS, BLOCK_SPARSE))


MIXTRAL = Family(
    "MixtralForCausalLM",
    read,
    models="Mixtral-8x7B, Mixtral-8x22B",
    layers="routed experts",
    constants={"qk_norm": False},
    layer=layer,
    has_experts=True,
    facts=facts,
    engine_lacks=frozenset({"dp", "deepep", "chosen_experts"}),
)
