"""Qwen3.5-MoE and Qwen3.6-MoE: the layers of Qwen3-Next, in a checkpoint that has a vision tower, too.

Projections of linear attention are matrices of their own, and all experts of a layer are two tensors. Rotary positions
of images have three axes (M-RoPE); those of text are equal on all, which is the usual rotation. The tower
(`model.visual.*`) is not trained. transformers writes a matrix for each projection of each expert, which are read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.model.families import qwen3_next
from megarl.model.families.blocks import GATED_SHARED_EXPERTS, Layer, experts, gated_attention
from megarl.model.families.delta_blocks import split_delta_net
from megarl.model.families.family import Family, Wrapper
from megarl.model.families.layouts import STACK
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape

_EXPERTS = "mlp.experts."
_TOP_K = "norm_topk_prob"
_MTP = replace(qwen3_next.MTP, key="mtp_num_hidden_layers")


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """As Qwen3-Next's. Raises UserError also for routers whose weights are not normalised."""
    if config.content.get(_TOP_K) not in (None, True):
        problem = f"{_TOP_K} is {config.content[_TOP_K]!r:.60}"
        raise config.error(problem, "use a checkpoint where it is true, or absent")
    return {**qwen3_next.read(config, common), "num_mtp_layers": _MTP.read(config)}


def normalised(config: ConfigFile) -> dict[str, Any]:
    """Published files do not say that the weights of a token's experts sum to 1."""
    return {_TOP_K: True}


def layer(shape: ModelShape, number: int) -> Layer:
    """Gated DeltaNet or gated attention, and experts."""
    mlp = experts(shape, GATED_SHARED_EXPERTS)
    if shape.is_linear(number):
        return Layer(split_delta_net(shape), mlp)
    return Layer(gated_attention(shape, qwen3_next.ATTENTION), mlp)


QWEN3_5_MOE = Family(
    "Qwen3_5MoeForConditionalGeneration",
    read,
    models="Qwen3.5-35B-A3B to Qwen3.5-397B-A17B, Qwen3.6-35B-A3B (text; the vision tower is kept as it is)",
    attention="as Qwen3-Next's",
    layers="as Qwen3-Next's",
    layer=layer,
    mtp=_MTP,
    megatron=qwen3_next.QWEN3_NEXT.megatron,
    has_experts=True,
    rotary_share=0.25,
    own_keys=frozenset({"layer_types"}),
    facts=normalised,
    wrapper=Wrapper(
        "text_config",
        own_prefix="model.",
        prefix="model.language_model.",
        untrained_prefixes=("model.visual.",),
        stacks={
            f"{_EXPERTS}gate_up_proj": (
                f"{_EXPERTS}{STACK}.gate_proj.weight",
                f"{_EXPERTS}{STACK}.up_proj.weight",
            ),
            f"{_EXPERTS}down_proj": (f"{_EXPERTS}{STACK}.down_proj.weight",),
        },
        without_tower={"language_model_only": True},  # models/qwen3_vl.py
    ),
)
