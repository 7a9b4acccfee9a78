"""A model's first layers, cut out of its checkpoint by scripts/keep_layers.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf_import import check_hf
from megarl.model.hf_config import model_shape
from megarl.types import UserError
from scripts.keep_layers import INDEX, keep_layers
from tests.parallel import checkpoints


def split(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's one file as three with an index, dealt round; its tensors."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    weight_map = {name: f"model-0000{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: whole[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return whole


def test_a_model_with_a_vision_tower_keeps_it(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path / "model", "kimi-k25")
    out = tmp_path / "out"
    keep_layers(model, out, 2)
    shape = model_shape(out)
    assert shape.num_layers == 2 and check_hf(out, shape) == []
    whole = load_file(model / "model.safetensors")
    beyond = tuple(f"language_model.model.layers.{layer}." for layer in (2, 3))
    assert set(load_file(out / "model.safetensors")) == {
        name for name in whole if not name.startswith(beyond)
    }


@pytest.mark.parametrize("is_split", [False, True])
def test_a_deepseek_keeps_its_first_layers_and_no_prediction_layer(
    tmp_path: Path, is_split: bool
) -> None:
    model, out = (
        checkpoints.write(tmp_path / "model", "deepseek-v3", mtp_layers=1),
        tmp_path / "out",
    )
    whole = split(model) if is_split else load_file(model / "model.safetensors")
    (model / "tokenizer.json").write_text("{}")
    keep_layers(model, out, 2)
    shape = model_shape(out)
    assert (shape.num_layers, shape.num_dense_layers, shape.num_mtp_layers) == (2, 1, 0)
    assert check_hf(out, shape) == []
    kept = {
        name: tensor
        for file in out.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    beyond = tuple(f"model.layers.{layer}." for layer in (2, 3, 4))
    assert set(kept) == {name for name in whole if not name.startswith(beyond)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in kept.items())
    assert (out / "tokenizer.json").is_file()
    assert (out / INDEX).exists() == is_split


def test_the_first_layers_compute_what_they_did(tmp_path: Path) -> None:
    """A cut model's last hidden state, before the final norm, is the whole model's after as many layers."""
    model, out = checkpoints.write(tmp_path / "model", "qwen3-moe"), tmp_path / "out"
    keep_layers(model, out, 3)
    ids = torch.arange(2, 12)[None]
    (whole, _), (cut, missing) = checkpoints.load(model), checkpoints.load(out)
    assert not any(missing[kind] for kind in ("missing_keys", "unexpected_keys"))
    with torch.no_grad():
        before_norm = whole(ids, output_hidden_states=True).hidden_states[3]
        torch.testing.assert_close(cut(ids).logits, whole.lm_head(whole.model.norm(before_norm)))


def test_what_cannot_be_cut(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path / "model", "llama")
    for count in (0, 5):
        with pytest.raises(UserError, match=f"--layers: {count} of 4 layers"):
            keep_layers(model, tmp_path / "out", count)
    with pytest.raises(UserError, match="it is there already"):
        keep_layers(model, model, 1)
    with pytest.raises(UserError, match="no such file"):
        keep_layers(tmp_path / "gone", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()
