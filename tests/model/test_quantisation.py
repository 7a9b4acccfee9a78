"""`quantization_config`: the formats that are read, and the refusal of all others by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megarl.model.hf_config import hf_facts, model_shape, read_model
from megarl.model.quantisation import FP8_CONFIG, HINT, Quantisation
from megarl.types import UserError
from tests.model.test_hf_config import CONFIG, write

FP8: dict[str, Any] = dict(FP8_CONFIG)
INT4: dict[str, Any] = {  # Kimi-K2-Thinking's
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    new_config = copy.deepcopy(config)
    *parents, last = path.split("/")
    branch = new_config
    for key in parents:
        branch = branch[key]
    branch[last] = value
    return new_config


@pytest.mark.parametrize(
    ("config", "found", "words"),
    [
        ({}, None, ""),
        ({"quantization_config": None}, None, ""),
        ({"quantization_config": FP8}, Quantisation("fp8"), "fp8 tiles of 128 x 128"),
        (
            {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
            Quantisation("fp8", has_power_of_two_scales=True),
            "fp8 tiles of 128 x 128 with scales that are powers of two",
        ),
        (
            {"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"]}},
            Quantisation("fp8", excluded=("lm_head",)),
            "fp8 tiles of 128 x 128",
        ),
        (
            {"quantization_config": INT4},
            Quantisation("int4", excluded=tuple(INT4["ignore"])),
            "int4 groups of 32",
        ),
        (
            {"compression_config": INT4},
            Quantisation("int4", excluded=tuple(INT4["ignore"])),
            "int4 groups of 32",
        ),
    ],
)
def test_what_is_read(
    tmp_path: Path, config: dict[str, Any], found: Quantisation | None, words: str
) -> None:
    facts = hf_facts(write(tmp_path, CONFIG | config))
    assert facts.quantisation == found
    assert words == (str(found) if found else "")
    assert model_shape(tmp_path) == model_shape(write(tmp_path, CONFIG)), (
        "the shape does not depend on it"
    )


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "awq", "bits": 4}, 'quantization_config.quant_method of {} is "awq"'),
        ({"bits": 4}, "quantization_config.quant_method of {} is null"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size of {} is null"),
        (
            FP8 | {"weight_block_size": [1, 128]},
            "quantization_config.weight_block_size of {} is [1, 128]",
        ),
        (FP8 | {"fmt": "e5m2"}, 'quantization_config.fmt of {} is "e5m2"'),
        (FP8 | {"scale_fmt": "e4m3"}, 'quantization_config.scale_fmt of {} is "e4m3"'),
        (
            INT4 | {"format": "nvfp4-pack-quantized"},
            'quantization_config.format of {} is "nvfp4-pack-quantized"',
        ),
        (
            changed(INT4, "config_groups/group_0/weights/group_size", 128),
            "quantization_config.config_groups.group_0.weights.group_size of {} is 128",
        ),
        (
            changed(INT4, "config_groups/group_0/weights/symmetric", False),
            "quantization_config.config_groups.group_0.weights.symmetric of {} is false",
        ),
    ],
)
def test_other_formats_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    model = read_model(write(tmp_path, CONFIG | {"quantization_config": config}))
    assert model.known_shape is None and model.facts is None
    file = tmp_path / "config.json"
    assert str(model.error) == f"model.path: {problem.format(file)}; {HINT}"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ([], "quantization_config is []"),
        (INT4 | {"ignore": ["re:("]}, "quantization_config.ignore has 're:('"),
        (INT4 | {"ignore": "lm_head"}, "ignore is 'lm_head'"),
        (INT4 | {"config_groups": [1]}, "config_groups is [1]"),
    ],
)
def test_broken_ones(tmp_path: Path, config: Any, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        hf_facts(write(tmp_path, CONFIG | {"quantization_config": config}))
    assert problem in str(caught.value)
    assert caught.value.where == str(tmp_path / "config.json")


def test_weights_that_are_excluded() -> None:
    experts = Quantisation("int4", excluded=tuple(INT4["ignore"]))
    layer = "model.layers.3."
    covered = {
        "lm_head.weight": False,
        f"{layer}self_attn.o_proj.weight": False,
        f"{layer}mlp.gate_proj.weight": False,
        f"{layer}mlp.shared_experts.up_proj.weight": False,
        f"{layer}mlp.experts.7.up_proj.weight": True,
    }
    assert {name: experts.covers(name) for name in covered} == covered
    whole_layer = Quantisation("fp8", excluded=("model.layers.3",))
    assert not whole_layer.covers(f"{layer}mlp.gate_proj.weight")
    assert whole_layer.covers("model.layers.30.mlp.gate_proj.weight")
