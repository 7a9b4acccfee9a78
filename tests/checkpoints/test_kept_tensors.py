"""Tensors that training leaves as they are: found by their names, and copied byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints import kept_tensors
from megarl.model.hf_config import model_shape
from tests.parallel import checkpoints


def test_a_copy_has_the_bytes_of_the_tensors_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tensors, "_CHUNK_BYTES", 7)
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(2, 2),
        "c": torch.randint(-128, 127, (9,), dtype=torch.int8),
        "d": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    names = ["d", "empty", "a", "c"]
    kept_tensors.copy(tmp_path / "in.safetensors", names, tmp_path / "out.safetensors")
    copied = load_file(tmp_path / "out.safetensors")
    assert copied.keys() == {*names}
    for name in names:
        assert copied[name].dtype == tensors[name].dtype
        assert copied[name].shape == tensors[name].shape
        assert copied[name].view(torch.uint8).equal(tensors[name].view(torch.uint8)), name


def test_a_file_that_ends_inside_a_tensor_is_no_copy(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    save_file({"a": torch.randn(64)}, source)
    source.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(OSError, match="in.safetensors ends inside a tensor"):
        kept_tensors.copy(source, ["a"], tmp_path / "out.safetensors")


def test_the_kept_tensors_are_those_beside_the_language_model(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "kimi", "kimi-k25")
    ((file, names),) = kept_tensors.names_by_file(str(path), model_shape(path)).items()
    stored = load_file(file)
    assert {*names} == {name for name in stored if not name.startswith("language_model.")}
    assert "vision_tower.patch_embed.proj.weight" in names
    plain = checkpoints.write(tmp_path / "llama", "llama")
    assert kept_tensors.names_by_file(str(plain), model_shape(plain)) == {}
