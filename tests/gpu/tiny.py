"""Tiny checkpoints of some families, written without transformers, whose versions differ between machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.model.hf_config import model_shape
from megarl.model.tensors import aliases, hf_tensors

COMMON: Mapping[str, Any] = {
    "vocab_size": 200,  # no multiple of what Megatron pads to
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 50000.0,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        # another than the keys', and a power of two, as fused rotary positions want it
        "v_head_dim": 32,
        "rope_parameters": YARN,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "glm-5": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "rope_theta": 50000.0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "index_n_heads": 16,
        "index_head_dim": 32,
        # more keys than the longest sequence has: in bfloat16 another key may be the last of those chosen
        "index_topk": 4096,
        "indexer_rope_interleave": True,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.25,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-2,
        # layers of both kinds
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 50000.0,
        "rotary_dim": 16,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
}
# whose norms multiply by 1 + weight, but for those behind linear attention
WITH_CENTRED_NORMS = {"qwen3-next"}


def write(folder: Path, family: str, **changes: Any) -> Path:
    """config.json and model.safetensors with random weights; returns the folder."""
    write_config(folder, family, **changes)
    generator = torch.Generator().manual_seed(5)
    shape = model_shape(folder)
    tensors = {
        name: _values(name, size, generator) for name, size in sorted(hf_tensors(shape).items())
    }
    if family in WITH_CENTRED_NORMS:
        for name, tensor in tensors.items():
            if "norm" in name and "linear_attn" not in name:
                tensor -= 1
    tensors |= {copy: tensors[name].clone() for copy, name in aliases(shape).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """config.json alone; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **FAMILIES[family], **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _values(name: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Ones would hide a wrong norm."""
    if "norm" in name:
        return torch.rand(size, generator=generator) + 0.5
    return torch.randn(size, generator=generator) * 0.1
