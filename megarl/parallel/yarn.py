"""YaRN with grouped-query attention in Megatron's configuration; latent attention has fields of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.model.rope import Yarn
from megarl.types import UserError

# Kernels that turn packed queries and keys without YaRN's scale of them (rope_utils.py, attention.py).
_UNSCALED = ("apply_rope_fusion", "fused_single_qkv_rope")


@dataclass
class YarnConfig(TransformerConfig):
    """A configuration with the fields that GPTModel and attention read by name, and that Megatron declares nowhere."""

    position_embedding_type: str = "yarn"
    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True


def yarn_fields(yarn: Yarn) -> dict[str, Any]:
    """The fields of `YarnConfig` that the checkpoint decides."""
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_positions,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.mscale,
        "yarn_mscale_all_dim": yarn.mscale_all_dim,
        "yarn_correction_range_round_to_int": yarn.rounds,
    }


def refuse_unscaled(options: Mapping[str, Any]) -> None:
    """Raises UserError for an option of `train.megatron` with which Megatron leaves YaRN's scale out."""
    for key in _UNSCALED:
        if options.get(key):
            problem = "its kernel leaves out the factor by which YaRN scales queries and keys"
            raise UserError(f"train.megatron.{key}", problem, "set it to false, or remove it")
