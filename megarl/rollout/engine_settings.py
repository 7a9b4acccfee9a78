"""The settings with which each engine of a run starts, made from its recipe and the model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.hardware import communicator_bytes
from megarl.model.hf_config import model_shape
from megarl.model.quantisation import QUANTISATION_KEYS
from megarl.placement.roles import engine_layout, lora_size
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.arguments import EngineSettings, NodeSpan
from megarl.rollout.sglang.batch_sizes import most_sequences
from megarl.rollout.sglang.deterministic import generator_seed


def engine_settings(recipe: Recipe, index: int, span: NodeSpan | None = None) -> EngineSettings:
    """The settings of engine `index` of a run: its slots, its concurrency and its seed.

    span: the engine's node that this process runs on, where the engine spans several.
    """
    rollout = recipe.rollout
    layout = engine_layout(recipe)
    config = _config(recipe.model.path)
    return EngineSettings(
        model_path=recipe.model.path,
        layout=layout,
        engine=rollout.engine,
        dtype=recipe.model.dtype,
        seed=generator_seed(recipe.run.seed, index),
        context_tokens=recipe.data.max_prompt_tokens + recipe.longest_response,
        concurrency=most_sequences(recipe),
        first_gpu=recipe.placement.gpu_of(layout.first + index * layout.tp),
        load_weights=False,
        quantised=any(key in config for key in QUANTISATION_KEYS),
        seeded=rollout.seeded,
        routed_experts=recipe.train.replay == "r3",
        span=span,
        timeout_s=recipe.run.timeout_s,
        model_context=config.get("max_position_embeddings"),
        reserve_bytes=communicator_bytes(recipe.placement.hardware),
        adapter=_adapter(recipe),
    )


def _adapter(recipe: Recipe) -> AdapterSlot | None:
    if recipe.lora is None:
        return None
    shape = model_shape(recipe.model.path)
    return AdapterSlot.of(shape, lora_size(recipe.lora, shape))


def _config(model_path: str) -> dict[str, Any]:
    """The model's config.json; empty where there is none."""
    file = Path(model_path) / "config.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    return {}
