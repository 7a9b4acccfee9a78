"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated attention; routed experts and a gated shared one.

The published files also have one layer of multi-token prediction (`mtp.*`), of which their config.json says nothing: it
is left out where the user does not write `num_nextn_predict_layers: 1` there, which is the key that SGLang adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.blocks import (
    GATED_SHARED_EXPERTS,
    Layer,
    Modules,
    experts,
    gated_attention,
)
from megarl.model.families.delta_blocks import delta_net
from megarl.model.families.family import Family, read_experts, read_gated_shared, read_heads
from megarl.model.families.mtp_frame import MtpFrame
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import DeltaShape, ModelShape

# SGLang has the modules of full attention in the layer itself (models/qwen3_next.py)
ATTENTION = Modules("self_attn.", "self_attention.", "")
# variants that SGLang has and the training ranks have not
_KNOWN_VALUES = {"output_gate_type": ("swish", "silu"), "attn_output_gate": (True,)}
_LINEAR = "linear_attention"
_FULL = "full_attention"
# a layer of full attention; what SGLang's models/qwen3_next_mtp.py has around it is in the model, not in a layer
MTP = MtpFrame(
    norms=(
        ("pre_fc_norm_embedding", "enorm", "pre_fc_norm_embedding"),
        ("pre_fc_norm_hidden", "hnorm", "pre_fc_norm_hidden"),
        ("norm", "final_layernorm", "model.norm"),
    ),
    projection="fc",
    copies=(),
    prefix="mtp.",
    layer_prefix="mtp.layers.{index}.",
    draft_frame="",
    draft_layer="model.layers.0.",
    most=1,
)


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Raises UserError for layers of another order, and for shared experts of another width than whole experts."""
    config.known(_KNOWN_VALUES)
    sizes = read_heads(config, common) | read_experts(config)
    delta = DeltaShape(
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel_size=config.integer("linear_conv_kernel_dim"),
        full_every=_full_every(config, common["num_layers"]),
    )
    if delta.num_value_heads % delta.num_key_heads:
        problem = f"linear_num_value_heads ({delta.num_value_heads}) is no multiple of "
        problem += f"linear_num_key_heads ({delta.num_key_heads})"
        raise config.error(problem, "use a checkpoint where each key head has as many value heads")
    return {
        **sizes,
        "num_shared_experts": read_gated_shared(config, sizes["moe_ffn_size"]),
        "num_mtp_layers": MTP.read(config),
        "delta": delta,
    }


def _full_every(config: ConfigFile, num_layers: int) -> int:
    """How many layers it is from one with full attention to the next.

    SGLang reads it from full_attention_interval, which transformers 5 writes into no file, and not from layer_types.
    """
    kinds = config.texts("layer_types")
    every = config.integer("full_attention_interval")
    expected = [_FULL if number % every == 0 else _LINEAR for number in range(1, num_layers + 1)]
    if kinds and kinds != expected:
        hint = f"use a checkpoint where every {every}th layer has {_FULL} and all others {_LINEAR}"
        raise config.error("layer_types has another order than full_attention_interval", hint)
    return every


def layer(shape: ModelShape, number: int) -> Layer:
    """Gated DeltaNet or gated attention, and experts."""
    if shape.is_linear(number):
        return Layer(delta_net(shape), experts(shape, GATED_SHARED_EXPERTS))
    return Layer(gated_attention(shape, ATTENTION), experts(shape, GATED_SHARED_EXPERTS))


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    read,
    models="Qwen3-Next-80B-A3B",
    attention="three layers of Gated DeltaNet, then one of grouped-query attention with a gate of its output; rotary "
    "positions turn a quarter of each head; norms that multiply by 1 + their weight",
    layers="routed experts, and a shared one with a gate; multi-token prediction (MTP)",
    layer=layer,
    mtp=MTP,
    megatron={
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_gate": True,
    },
    has_experts=True,
    rotary_share=0.25,
    own_keys=frozenset({"layer_types"}),
    engine_lacks=frozenset({"other_dtype"}),  # of its norms (models/qwen3_next.py)
)
