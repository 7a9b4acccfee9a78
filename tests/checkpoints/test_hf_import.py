"""Reading HF checkpoints: the header check, and boxes into parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf_files import tensor_files
from megarl.checkpoints.hf_import import check_hf, load_hf
from megarl.model.hf_config import model_shape
from megarl.model.tensors import hf_tensors
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Shard, param_table
from megarl.types import UserError
from tests.model.test_hf_config import CONFIG, SHAPE
from tests.parallel import checkpoints
from tests.resharding.test_sglang_map import fill


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(size, generator=generator) for name, size in hf_tensors(SHAPE).items()}


def write(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None
) -> Path:
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


def test_check_names_the_first_of_each_kind(tmp_path: Path) -> None:
    weights = tensors()
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(9, 6)
    weights["model.layers.1.mlp.experts.3.down_proj.weight"] = torch.zeros(6)
    errors = "\n".join(map(str, check_hf(write(tmp_path, CONFIG, weights), SHAPE)))
    assert errors.count("\n") == 1
    assert "no tensor model.norm.weight" in errors
    assert (
        "model.layers.1.mlp.experts.3.up_proj.weight is [9, 6], config.json says [8, 6] (and 1 more such"
        in errors
    )


def test_a_draft_layer_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    (error,) = check_hf(
        write(tmp_path, CONFIG, tensors()), dataclasses.replace(SHAPE, num_mtp_layers=1)
    )
    assert "config.json: num_nextn_predict_layers is 1, the files have no such layer; write" in str(
        error
    )


def test_a_draft_layer_of_which_the_config_says_nothing_is_ignored(tmp_path: Path) -> None:
    """Published Qwen3-Next has one under mtp."""
    path = checkpoints.write(tmp_path, "qwen3-next")
    weights = load_file(path / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    draft = {
        "mtp.fc.weight": torch.rand(hidden, 2 * hidden),
        "mtp.layers.0.mlp.gate.weight": torch.rand(8, hidden),
    }
    save_file(weights | draft, path / "model.safetensors")
    shape = model_shape(path)
    assert check_hf(path, shape) == []
    shards = megatron_map.shards(shape, TrainLayout(1, 1, 1, 1), 0)
    sizes = param_table(shards)
    params = {name: torch.full(sizes[name][1:], 9.0) for name in sizes}
    vocab = TrainLayout(1, 1, 1, 1).padded_vocab(shape.vocab_size)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        params[name] = torch.full((vocab, hidden), 9.0)
    load_hf(path, shards, params)
    assert not any((tensor == 9.0).any() for tensor in params.values())


def test_check_without_weights_is_one_error(tmp_path: Path) -> None:
    (error,) = check_hf(write(tmp_path, CONFIG), SHAPE)
    assert "model.safetensors: no such file" in str(error)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    (error,) = check_hf(tmp_path, SHAPE)
    assert "is not a safetensors file" in str(error)


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    write_in_two_files(tmp_path, tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"names missing files: model-00002"):
        tensor_files(tmp_path)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rectangles_are_loaded(tmp_path: Path, files: int, dtype: torch.dtype) -> None:
    """The boxes of two TP ranks; the padding of the vocabulary becomes zero."""
    weights = tensors()
    folder = (
        write(tmp_path, CONFIG, weights) if files == 1 else write_in_two_files(tmp_path, weights)
    )
    for rank in range(2):
        shards = megatron_map.shards(SHAPE, TrainLayout(2, 2, 1, 2), rank)
        expected = fill(shards, weights, {"output_layer.weight": 128})
        params = {
            name: torch.full_like(tensor[0], 9.0, dtype=dtype) for name, tensor in expected.items()
        }
        load_hf(folder, shards, params)
        for name, tensor in expected.items():
            assert torch.equal(params[name], tensor[0].to(dtype)), name


def test_loading_names_a_missing_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, tensors())
    shard = Shard("model.layers.9.input_layernorm.weight", (0, 6), (0, 1), "p")
    with pytest.raises(UserError, match=r"no tensor model\.layers\.9\.input_layernorm\.weight"):
        load_hf(folder, [shard], {"p": torch.zeros(6)})
