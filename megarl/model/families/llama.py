"""Llama 2 and 3."""

from __future__ import annotations

from megarl.model.families.family import Family, read_dense

LLAMA = Family(
    "LlamaForCausalLM",
    read_dense,
    models="Llama 2 and 3 without rope scaling of Llama's own",
    attention="grouped-query, YaRN",
    constants={"qk_norm": False},
    has_yarn=True,
)
