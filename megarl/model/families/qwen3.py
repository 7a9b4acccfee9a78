"""Qwen3 without experts."""

from __future__ import annotations

from megarl.model.families.family import Family, read_dense

QWEN3 = Family(
    "Qwen3ForCausalLM",
    read_dense,
    models="Qwen3 dense",
    attention="grouped-query, norms of queries and keys, YaRN",
    has_yarn=True,
)
