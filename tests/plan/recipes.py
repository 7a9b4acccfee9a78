"""Recipes to plan: a small one that every axis divides, and DeepSeek-V3 on 512 GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from tests.plan.plans import CONFIGS, ROOT

H800 = ROOT / "recipes" / "hardware" / "h800.yaml"
SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
# linear attention in three of four layers, with four key heads
SMALL_LINEAR = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "partial_rotary_factor": 0.25,
    "vocab_size": 1024,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
_STAGES = [4] * 13 + [3] * 3


def recipe(folder: Path, config: dict[str, Any], *overrides: str) -> Recipe:
    """The quickstart's recipe with a model of which there is the config.json alone."""
    (folder / "config.json").write_text(json.dumps(config))
    keys = [
        "model.path=nowhere",
        f"model.config={folder}",
        "model.dtype=bfloat16",
        "warm_start.steps=0",
    ]
    return load_recipe(
        ROOT / "recipes" / "quickstart.yaml", [*keys, f"placement.hardware={H800}", *overrides]
    )


def small(folder: Path, *overrides: str, config: dict[str, Any] = SMALL) -> Recipe:
    """A model of 4 layers and 8 experts on two nodes of 4 GPUs."""
    keys = [
        "placement.gpus=8",
        "placement.gpus_per_node=4",
        "rollout.engine.count=2",
        "rollout.engine.tp=4",
    ]
    return recipe(folder, config, *keys, *overrides)


def deepseek(folder: Path, *overrides: str) -> Recipe:
    """DAPO of DeepSeek-V3 on 64 nodes of 8 GPUs: TP4 PP16 EP32 into engines of TP32."""
    values = {
        "data.max_prompt_tokens": 2048,
        "algorithm.name": "dapo",
        "rollout.prompts_per_step": 512,
        "rollout.samples_per_prompt": 16,
        "rollout.max_response_tokens": 20480,
        "rollout.engine": "{count: 16, tp: 32, ep: 32}",
        "train.tp": 4,
        "train.pp": 16,
        "train.ep": 32,
        "train.layers_per_stage": _STAGES,
        "train.tokens_per_micro_batch": 22528,
        "train.updates_per_step": 16,
        "train.optimizer_offload": "true",
        "train.megatron": "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
        "checkpoint.every": 20,
        "placement.gpus": 512,
        "placement.network": "nodes",
    }
    return recipe(
        folder,
        CONFIGS["deepseek-v3"],
        *(f"{key}={value}" for key, value in values.items()),
        *overrides,
    )
