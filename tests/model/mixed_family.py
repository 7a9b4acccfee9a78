"""A family with the blocks that few families have: linear attention, gated attention, a gate of shared experts."""

from __future__ import annotations

from megarl.model.families.blocks import (
    Experts,
    Layer,
    Modules,
    attention,
    experts,
    gated_attention,
)
from megarl.model.families.delta_blocks import delta_net
from megarl.model.families.family import Family, read_sparse
from megarl.model.shape import DeltaShape, ModelShape

GATED = Experts(shared="shared_expert", shared_gate="shared_expert_gate.weight")
AT_TOP = Modules("self_attn.", "self_attention.", "")  # as Qwen3-Next's full attention in SGLang


def layer(shape: ModelShape, number: int) -> Layer:
    mlp = experts(shape, GATED)
    if shape.is_linear(number):
        return Layer(delta_net(shape), mlp)
    return Layer(gated_attention(shape, AT_TOP), mlp)


def wide_layer(shape: ModelShape, number: int) -> Layer:
    return Layer(attention(shape, wide_norms=True), experts(shape, GATED))


MIXED = Family("MixedForCausalLM", read_sparse, layer=layer)
WIDE = Family("WideForCausalLM", read_sparse, layer=wide_layer)
MIXED_SHAPE = ModelShape(
    4, 6, 8, 4, 2, 300, num_experts=8, experts_per_token=2, moe_ffn_size=16, num_shared_experts=1,
    delta=DeltaShape(4, 8, key_dim=3, value_dim=2, kernel_size=4, full_every=4),
    family="tests.model.mixed_family:MIXED",
)  # fmt: skip
WIDE_SHAPE = ModelShape(
    2, 6, 8, 4, 2, 300, num_experts=8, experts_per_token=2, moe_ffn_size=16, num_shared_experts=1,
    family="tests.model.mixed_family:WIDE",
)  # fmt: skip
