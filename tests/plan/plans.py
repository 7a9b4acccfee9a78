"""Recipes of real shapes for tests of plans: config.json alone, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.model.hf_config import HfModel
from megarl.model.shape import ModelShape
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.roles import RoleName
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import step_samples
from megarl.plan.fit import with_errors
from megarl.plan.model_size import ModelSize
from megarl.plan.phase_memory import MemoryPlan, plan_memory

MANY = 10**6  # micro-batches: more than any pipeline has in flight

_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b": _QWEN3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    "kimi-k2": json.loads(
        (Path(__file__).parents[2] / "recipes/models/kimi-k2/config.json").read_text()
    ),
    "tiny": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "num_nextn_predict_layers": 1,
    },
    "tiny-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}
H800 = Hardware(
    name="H800",
    memory_bytes=84_930_000_000,
    bf16_flops=989.4e12,
    hbm_bytes_per_s=3.35e12,
    nvlink_bytes_per_s=200e9,
    nic_bytes_per_s=50e9,
    pcie_bytes_per_s=50e9,
    host_bytes=2_000_000_000_000,
    disk_bytes_per_s=5e9,
    compute_share=0.4,
    prefill_share=0.4,
    hbm_share=0.7,
    nvlink_share=0.8,
    nic_share=0.9,
    nvlink_latency_s=15e-6,
    nic_latency_s=40e-6,
)


def recipe(
    folder: Path, model: str, gpus: int, *, engine: dict[str, Any] | None = None, **more: Any
) -> Recipe:
    """Of one of `CONFIGS`, written into `folder`; more: keys of `train`, and whole branches of the recipe."""
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
    branches = {"algorithm", "critic", "reward_model", "reference", "checkpoint", "reshard"}
    return Recipe.model_validate(
        {
            "run": {"name": "plan", "steps": 1},
            "model": {"path": str(path), "dtype": more.pop("dtype", "bfloat16")},
            "data": {"train": "none", "max_prompt_tokens": 2048},
            "reward": {"function": "none"},
            "rollout": {
                "prompts_per_step": 512,
                "samples_per_prompt": 16,
                "max_response_tokens": 8192,
                "engine": engine or {"count": 1, "tp": 1},
            },
            "placement": {"gpus": gpus, **more.pop("placement", {})},
            **{key: more.pop(key) for key in branches & more.keys()},
            "train": {"lr": 1e-6, "tokens_per_micro_batch": 16384, **more},
        }
    )


def size(
    role: RoleName,
    shape: ModelShape,
    recipe: Recipe,
    layout: TrainLayout,
    first_slot: int,
    stages: tuple[tuple[ChunkSize, ...], ...],
) -> ModelSize:
    """Of a role whose ranks hold these chunks."""
    model = HfModel(recipe.model.path, shape)
    return ModelSize(role, recipe, layout, first_slot, bool(shape.num_labels), model, stages)


def count(recipe: Recipe, hardware: Hardware, sizes: Mapping[RoleName, ModelSize]) -> MemoryPlan:
    """The memory where responses have half of the longest length in the mean."""
    return plan_memory(recipe, hardware, sizes, step_samples(recipe, 0.5), MANY)


def memory(recipe: Recipe, hardware: Hardware, sizes: Mapping[RoleName, ModelSize]) -> MemoryPlan:
    """The same with faults."""
    return with_errors(
        recipe, hardware, sizes, lambda changed, found: count(changed, hardware, found)
    )
