"""Multi-head latent attention (MLA) in Megatron's configuration. Pure."""

from __future__ import annotations

from typing import Any

from megarl.model.hf_config import HfFacts
from megarl.model.shape import MlaShape


def latent_fields(mla: MlaShape, facts: HfFacts) -> dict[str, Any]:
    """The fields of MLATransformerConfig that the checkpoint decides."""
    fields = {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rotary_base": facts.rope_theta,
        "rope_type": "yarn" if facts.yarn else "rope",
    }
    if facts.yarn:
        fields |= {
            "rotary_scaling_factor": facts.yarn.factor,
            "original_max_position_embeddings": facts.yarn.original_positions,
            "beta_fast": facts.yarn.beta_fast,
            "beta_slow": facts.yarn.beta_slow,
            "mscale": facts.yarn.mscale,
            "mscale_all_dim": facts.yarn.mscale_all_dim,
        }
    return fields


def has_fused_rope(mla: MlaShape, facts: HfFacts) -> bool:
    """Whether Megatron's fused kernels (fusions/fused_mla_yarn_rope_apply.py), which need YaRN, support this model.

    Triton's `arange` needs powers of two for the widths of keys and values and for half of the rotary width; the
    kernels need a rotary width that is a multiple of four.
    """
    widths = (mla.nope_dim, mla.v_dim, mla.rope_dim // 2)
    are_powers = all(width.bit_count() == 1 for width in widths)
    return facts.yarn is not None and are_powers and mla.rope_dim % 4 == 0
