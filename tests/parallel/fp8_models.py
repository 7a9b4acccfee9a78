"""Tiny models whose layers have whole tiles on two ranks, and recipes of ranks and engines that compute in fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.worlds import recipe

WIDE: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"head_dim": 128, "moe_intermediate_size": 256, "num_hidden_layers": 2},
    "deepseek-v3": {
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    },
}
PLAIN_KINDS = {"qwen3-moe": (), "deepseek-v3": ("kv_b_proj",)}


def write_wide(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of a family, in `folder`, which is returned."""
    return write(folder, family, **WIDE[family], **changes)


def fp8_recipe(path: Path, family: str, layout: TrainLayout, **train: Any) -> Recipe:
    """A recipe of `recipe` with engines in fp8, and ranks that compute as they do unless `numbers` is given."""
    made = recipe(path, layout, **{"numbers": "engine", **train})
    values = made.model_dump()
    values["rollout"]["engine"]["weights"] = "fp8"
    values["precision"] = {"plain": PLAIN_KINDS[family], "scales": "powers_of_two"}
    return Recipe.model_validate(values)
