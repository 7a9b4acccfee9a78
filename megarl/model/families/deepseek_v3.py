"""DeepSeek-V3 and R1; Kimi-K2 and Moonlight have the same architecture."""

from __future__ import annotations

from megarl.model.families.family import Family, read_latent

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    read_latent,
    models="DeepSeek-V3 and R1, Kimi-K2, Moonlight",
    attention="latent (MLA), YaRN or none",
    layers="dense layers, then routed and shared experts, multi-token prediction (MTP)",
    constants={"router_bias": True, "qk_norm": False},
    has_experts=True,
    has_sigmoid_router=True,
    has_yarn=True,
)
