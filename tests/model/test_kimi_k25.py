"""Kimi-K2.5's published sizes and formats, and what of its config.json is read where."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.hf_export import Export, exported_config
from megarl.checkpoints.quantised import file_bytes
from megarl.model.hf_config import end_token_ids, hf_facts, model_shape
from megarl.model.precision import PLAIN, Precision
from megarl.model.quantisation import KEY
from megarl.model.tensors import hf_tensors, is_projection
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.engine_memory import weight_bytes
from megarl.types import UserError

PUBLISHED = json.loads((Path(__file__).parents[1] / "published" / "kimi-k2.5.json").read_text())
TEXT: dict[str, Any] = PUBLISHED["text_config"]
# of all published files, as their listing has them
FILE_BYTES = 554.27 * 2**30


def write(folder: Path, **changes: Any) -> Path:
    content = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def tower_parameters() -> int:
    """Of the tensors that the listing of the published files has beside the language model's."""
    hidden, ffn, merged, text = 1152, 4304, 4608, 7168
    norm = 2 * hidden
    attention = (3 * hidden + hidden) * (hidden + 1)
    block = 2 * norm + attention + ffn * (hidden + 1) + hidden * (ffn + 1)
    patches = hidden * (3 * 14 * 14 + 1) + 64 * 64 * hidden
    projector = norm + merged * (merged + 1) + text * (merged + 1)
    return 27 * block + norm + patches + projector


def test_the_shape_and_the_bytes_are_the_published_ones(tmp_path: Path) -> None:
    path = write(tmp_path)
    shape = model_shape(path)
    facts = hf_facts(path)
    assert sum(map(math.prod, hf_tensors(shape).values())) == pytest.approx(1026.4e9, rel=1e-4)
    engine = EngineLayout(1, 32, 32)
    plain = replace(shape, family="DeepseekV3ForCausalLM")
    of_tower = (
        weight_bytes(shape, engine, "bfloat16")[0] - weight_bytes(plain, engine, "bfloat16")[0]
    )
    assert of_tower == 2 * tower_parameters()
    of_files = file_bytes(shape, facts) + 2 * tower_parameters()
    assert of_files == pytest.approx(FILE_BYTES, rel=1e-5)
    assert (facts.rms_norm_eps, facts.max_positions, facts.routed_scaling) == (1e-5, 262144, 2.827)
    assert facts.yarn and (facts.yarn.factor, facts.yarn.beta_fast) == (64.0, 32.0)
    assert end_token_ids(path) == {163585}


@pytest.mark.parametrize("place", ["text_config", "the file itself", "both"])
def test_the_format_of_the_experts_is_read_wherever_it_is(tmp_path: Path, place: str) -> None:
    changes: dict[str, Any] = {}
    if place != "text_config":
        changes[KEY] = TEXT[KEY]
    if place == "the file itself":
        changes["text_config"] = TEXT | {KEY: None}
    quantisation = hf_facts(write(tmp_path, **changes)).quantisation
    assert quantisation and quantisation.kind == "int4"
    assert quantisation.covers("language_model.model.layers.1.mlp.experts.3.up_proj.weight")
    assert not quantisation.covers("language_model.model.layers.0.mlp.up_proj.weight")


def test_what_is_wrong_in_the_language_models_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="text_config is missing"):
        model_shape(write(tmp_path, text_config=None))
    with pytest.raises(UserError, match="hidden_act is"):
        model_shape(write(tmp_path, text_config=TEXT | {"hidden_act": "gelu"}))
    with pytest.raises(UserError, match="n_routed_experts|num_experts"):
        model_shape(write(tmp_path, text_config=TEXT | {"n_routed_experts": None}))


@pytest.mark.parametrize("fp8", [False, True])
def test_the_exported_config_is_the_published_one_with_the_exports_formats(
    tmp_path: Path, fp8: bool
) -> None:
    shape = model_shape(write(tmp_path))
    layout = TrainLayout(1, 1, 1, 1)
    job = Export(
        "",
        "",
        shape,
        layout,
        0,
        False,
        "bfloat16",
        1,
        1.0,
        precision=Precision("fp8") if fp8 else PLAIN,
    )
    config = exported_config(PUBLISHED | {KEY: TEXT[KEY]}, job)
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantisation = hf_facts(tmp_path).quantisation
    assert (quantisation is not None) == fp8
    if quantisation:
        assert quantisation.kind == "fp8"
        names = {f"language_model.{name}": is_projection(name) for name in hf_tensors(shape)}
        of_two_layers = {name for name in names if ".layers.0." in name or ".layers.9." in name}
        matrices = {name for name in of_two_layers if name.endswith("_proj.weight")}
        assert all(quantisation.covers(name) for name in matrices)
        others = {"language_model.lm_head", "language_model.model.layers.9.mlp.gate"}
        others |= {"vision_tower.patch_embed.proj", "mm_projector.proj.0"}
        assert not any(quantisation.covers(f"{name}.weight") for name in others)
    config.pop(KEY, None)
    assert config == PUBLISHED | {"text_config": {k: v for k, v in TEXT.items() if k != KEY}}
