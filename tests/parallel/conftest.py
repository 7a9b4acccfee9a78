"""A tiny Qwen3-MoE checkpoint, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cpu.sglang_patches import declare_torchvision_operators

# not a multiple of Megatron's 128 x TP: the padding must not leak into the softmax
VOCAB_SIZE = 200


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """Random weights in an ordinary HF folder; norms are perturbed, as ones would hide a wrong norm."""
    declare_torchvision_operators()  # transformers imports torchvision where it is installed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "rope_theta": 50_000.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-qwen3-moe"))
