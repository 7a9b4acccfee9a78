"""Qwen3-Next's config.json: what is read, and what is refused, by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.model.hf_config import hf_facts, model_shape
from megarl.model.precision import FP8_TILES
from megarl.model.shape import DeltaShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError

PUBLISHED = Path(__file__).parents[2] / "recipes" / "models" / "qwen3-next-80b-a3b"


def changed(folder: Path, **keys: Any) -> Path:
    config = json.loads((PUBLISHED / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_published_config() -> None:
    shape = model_shape(PUBLISHED)
    assert shape.delta == DeltaShape(16, 32, 128, 128, kernel_size=4, full_every=4)
    assert [layer for layer in range(9) if not shape.is_linear(layer)] == [3, 7]
    assert shape.num_linear_layers == 36
    assert hf_facts(PUBLISHED).rotary_share == 0.25


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"full_attention_interval": None}, "full_attention_interval"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"shared_expert_intermediate_size": 500}, "shared_expert_intermediate_size"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        model_shape(changed(tmp_path, **keys))


def test_layouts_that_do_not_divide_the_key_heads() -> None:
    shape = model_shape(PUBLISHED)
    good = TrainLayout(8, tp=4, pp=1, ep=1, cp=2)
    assert good.errors(shape) == []
    (error,) = TrainLayout(32, tp=8, pp=1, ep=4, cp=4).errors(shape)
    assert error.where == "train.cp" and "2 key heads" in error.problem
    assert EngineLayout(1, 8, 1).errors(shape, 8) == []
    assert [each.where for each in EngineLayout(1, 4, 1, precision=FP8_TILES).errors(shape, 4)] == [
        "rollout.engine.weights"
    ]
