"""Reading HF checkpoints: the config, the header check, and rectangles into parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoint import check_hf, load_hf, model_shape, tensor_files
from megarl.parallel.layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Shard, param_table
from megarl.resharding.tensors import model_tensors
from megarl.types import ModelShape, UserFault

SHAPE = ModelShape(2, 6, 4, 2, 4, 50, 4, 2, 8)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "tie_word_embeddings": False,
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(size, generator=generator) for name, size in model_tensors(SHAPE).items()}


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def write_in_two_files(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shape_is_read(tmp_path: Path) -> None:
    assert model_shape(write(tmp_path, CONFIG)) == SHAPE


def test_newer_name_of_the_expert_count(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert model_shape(write(tmp_path, config)) == SHAPE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"hidden_size": "6"}, "hidden_size is '6'"),
    ],
)
def test_unsupported_configs(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserFault) as caught:
        model_shape(write(tmp_path, CONFIG | change))
    assert problem in caught.value.problem
    assert caught.value.where == str(tmp_path / "config.json")


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="no such file; set model.path"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserFault, match="cannot be read"):
        model_shape(tmp_path)


def test_complete_checkpoint_has_no_faults(tmp_path: Path) -> None:
    assert check_hf(write(tmp_path, CONFIG, tensors()), SHAPE) == []


def test_check_names_the_first_of_each_kind(tmp_path: Path) -> None:
    weights = tensors()
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(9, 6)
    weights["model.layers.1.mlp.experts.3.down_proj.weight"] = torch.zeros(6)
    faults = "\n".join(map(str, check_hf(write(tmp_path, CONFIG, weights), SHAPE)))
    assert faults.count("\n") == 1
    assert "no tensor model.norm.weight" in faults
    assert "model.layers.1.mlp.experts.3.up_proj.weight is [9, 6], config.json says [8, 6] (and 1 more such" in faults


def test_check_without_weights_is_one_fault(tmp_path: Path) -> None:
    (fault,) = check_hf(write(tmp_path, CONFIG), SHAPE)
    assert "model.safetensors: no such file" in str(fault)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    (fault,) = check_hf(tmp_path, SHAPE)
    assert "is not a safetensors file" in str(fault)


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    write_in_two_files(tmp_path, tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserFault, match=r"names missing files: model-00002"):
        tensor_files(tmp_path)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rectangles_are_loaded(tmp_path: Path, files: int, dtype: torch.dtype) -> None:
    """Two TP ranks together hold each tensor; the padding of the vocabulary becomes zero."""
    weights = tensors()
    folder = write(tmp_path, CONFIG, weights) if files == 1 else write_in_two_files(tmp_path, weights)
    layout, parts = TrainLayout(2, 2, 1, 2), []
    for rank in range(2):
        shards = megatron_map.shards(SHAPE, layout, rank)
        params = {name: torch.full(size, 9.0, dtype=dtype) for name, size in param_table(shards).items()}
        params["output_layer.weight"] = torch.full((128, 6), 9.0, dtype=dtype)
        load_hf(folder, shards, params)
        parts.append(params)
    head = torch.cat([part["output_layer.weight"] for part in parts])
    assert torch.equal(head[:50], weights["lm_head.weight"].to(dtype))
    assert not head[50:].any()
    proj = torch.cat([part["decoder.layers.1.self_attention.linear_proj.weight"] for part in parts], dim=1)
    assert torch.equal(proj, weights["model.layers.1.self_attn.o_proj.weight"].to(dtype))
    fc1 = parts[1]["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
    expert = "model.layers.0.mlp.experts.3."
    gate_up = torch.cat([weights[expert + "gate_proj.weight"], weights[expert + "up_proj.weight"]])
    assert torch.equal(fc1, gate_up.to(dtype))


def test_loading_names_a_missing_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, tensors())
    shard = Shard("model.layers.9.input_layernorm.weight", (0, 6), (0, 1), "p", (0, 0))
    with pytest.raises(UserFault, match=r"no tensor model\.layers\.9\.input_layernorm\.weight"):
        load_hf(folder, [shard], {"p": torch.zeros(6)})
