"""Qwen3-MoE: grouped-query attention with norms of queries and keys, and routed experts in every layer."""

from __future__ import annotations

from megarl.model.families.family import Family, read_sparse

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    read_sparse,
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    attention="grouped-query, norms of queries and keys, YaRN",
    layers="routed experts",
    has_experts=True,
    has_yarn=True,
)
