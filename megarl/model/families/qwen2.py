"""Qwen2 and Qwen2.5 without experts."""

from __future__ import annotations

from megarl.model.families.family import Family, read_dense

QWEN2 = Family(
    "Qwen2ForCausalLM",
    read_dense,
    models="Qwen2, Qwen2.5",
    attention="grouped-query, biases of queries, keys and values, YaRN",
    constants={"qk_norm": False, "qkv_bias": True},
    has_yarn=True,
)
