"""The settings with which each engine of a run starts, made from its recipe and the model's config.json."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.hardware import communicator_bytes
from megarl.model.families import without_tower
from megarl.model.hf_config import HfModel, read_model
from megarl.model.rope import NEW_KEY
from megarl.placement.roles import engine_layout, lora_size
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.arguments import EngineSettings, NodeSpan
from megarl.rollout.sglang.batch_sizes import most_sequences
from megarl.rollout.sglang.deterministic import generator_seed
from megarl.types.json_objects import JsonObject


def engine_settings(recipe: Recipe, index: int, span: NodeSpan | None = None) -> EngineSettings:
    """The settings of engine `index` of a run: its slots, its concurrency and its seed.

    span: the engine's node that this process runs on, where the engine spans several.
    """
    rollout = recipe.rollout
    layout = engine_layout(recipe)
    model = read_model(
        recipe.model.path, recipe.model.family, rope_scaling=recipe.model.rope_values
    )
    lora = lora_size(recipe.lora, model.known_shape)
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
        quantised=model.facts is not None and model.facts.quantisation is not None,
        seeded=rollout.seeded,
        routed_experts=recipe.train.replay == "r3",
        span=span,
        timeout_s=recipe.run.timeout_s,
        model_context=model.context_tokens,
        reserve_bytes=communicator_bytes(recipe.placement.hardware),
        adapter=AdapterSlot.of(model.shape, lora) if lora else None,
        number=index,
        config_values=_config_values(recipe, model),
    )


def _config_values(recipe: Recipe, model: HfModel) -> JsonObject:
    """The values in place of those of config.json, under the names that SGLang's reader has for them.

    They are the recipe's, and those without which SGLang would serve images, too.
    """
    values = without_tower(model.known_shape) if model.known_shape else {}
    scaling = recipe.model.rope_values
    if scaling is None:
        return values
    return values | {
        NEW_KEY: {"rope_theta": model.required_facts.rope_theta, **scaling},
        "max_position_embeddings": model.context_tokens,
    }
