"""Mixtral."""

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

_EXPERTS = Experts(kinds=BLOCK_SPARSE_KINDS)


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """A window of attention is refused, also beside use_sliding_window, which Mixtral's classes do not read."""
    if config.content.get("sliding_window") is not None:
        problem = f"sliding_window is {config.content['sliding_window']!r:.60}"
        raise config.error(problem, "use a checkpoint where it is null")
    heads = read_heads(config, common)
    width, remainder = divmod(common["hidden_size"], common["num_heads"])
    if remainder or heads["head_dim"] != width:
        problem = f"head_dim is {heads['head_dim']}, and SGLang's heads are hidden_size / num_attention_heads wide"
        raise config.error(problem, f"use a checkpoint where it is {width}")
    return heads | read_experts_as_wide_as_mlps(config)


def facts(config: ConfigFile) -> dict[str, Any]:
    """Weights of a token's experts always sum to 1."""
    return {"norm_topk_prob": True}


def layer(shape: ModelShape, number: int) -> Layer:
    """Experts in every layer."""
    return Layer(attention(shape), experts(shape, _EXPERTS, BLOCK_SPARSE_MOE))


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
