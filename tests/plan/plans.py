"""Recipes of real shapes for tests of plans: config.json alone, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.model.hf_config import HfModel, model_shape
from megarl.model.shape import ModelShape
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import RoleName
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import RankWork, Samples, step_samples
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.fit import with_errors
from megarl.plan.model_size import ModelSize
from megarl.plan.phase_memory import MemoryPlan, plan_memory
from megarl.plan.run_plan import Tries
from megarl.plan.step_time import StepTime

NO_STEP = StepTime(*7 * [0.0])
MANY = 10**6  # micro-batches: more than any pipeline has in flight

ROOT = Path(__file__).parents[2]
_PUBLISHED = {
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "deepseek-v3": "deepseek-v3",
    "kimi-k2": "kimi-k2",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.5-397b-a17b": "qwen3.5-397b-a17b",
    "minimax-m2": "minimax-m2",
    "hy-v3": "hy-v3",
}
CONFIGS: dict[str, dict[str, Any]] = (
    {
        name: json.loads((ROOT / "recipes" / "models" / folder / "config.json").read_text())
        for name, folder in _PUBLISHED.items()
    }
    | {
        file.stem: json.loads(file.read_text())
        for file in sorted((ROOT / "tests" / "published").glob("*.json"))
    }
    | {
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
)
H800 = load_hardware(ROOT / "recipes" / "hardware" / "h800.yaml")
V3 = model_shape(ROOT / "recipes" / "models" / "deepseek-v3")
# 10 layers of 64 experts
SHAPE = ModelShape(
    10, 1024, 16, 4, 64, 32000, num_experts=64, experts_per_token=8, moe_ffn_size=512
)
EXPERTS_BYTES = 10 * 64 * 3 * 1024 * 512 * 2


def speed_of(
    layout: EngineLayout, kv_bytes: float = 0.0, shape: ModelShape = SHAPE, more_bytes: float = 0.0
) -> EngineSpeed:
    """Of engines with the experts of `SHAPE`, 100 MB of other weights and more_bytes."""
    weights = EXPERTS_BYTES / layout.tp + 1e8 + more_bytes
    return EngineSpeed(shape, layout, H800, 8, "bfloat16", weights, kv_bytes)


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
            "run": {"name": "plan", "steps": 1, **more.pop("run", {})},
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


def count(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[RoleName, ModelSize],
    mean_share: float = 0.5,
) -> MemoryPlan:
    """The memory where responses have that share of the longest length in the mean."""
    samples = step_samples(recipe, mean_share)
    return plan_memory(recipe, hardware, sizes, samples, _work(samples))


def _work(samples: Samples) -> RankWork:
    return RankWork(
        updates=1,
        dp=1,
        sequences=samples.num_trained,
        tokens=float(samples.lengths.sum()),
        tokens_full=samples.num_trained * samples.longest,
        micro_batches=MANY,
        micro_batches_full=MANY,
        bubble=0.0,
        balance=1.0,
    )


def memory(
    recipe: Recipe, hardware: Hardware, sizes: Mapping[RoleName, ModelSize], *mean_share: float
) -> MemoryPlan:
    """The same with faults."""
    tried = tries(recipe, hardware, sizes, *mean_share)
    return with_errors(recipe, hardware, sizes, tried.memory, tried.optimizer_s)


def tries(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[RoleName, ModelSize],
    mean_share: float = 0.5,
) -> Tries:
    """Other recipes of the same layouts, beside a step that takes no time."""
    samples = step_samples(recipe, mean_share)
    return Tries(hardware, sizes, samples, dict.fromkeys(sizes, _work(samples)), NO_STEP)
