"""Qwen3.5-MoE's config.json and its files: what is read, in both forms of the experts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf_import import check_hf, load_hf
from megarl.model.families import family_of, name_in_files, without_tower
from megarl.model.hf_config import end_token_ids, hf_facts, model_shape, read_model
from megarl.model.shape import DeltaShape, ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import param_table
from megarl.types import UserError
from tests.parallel.checkpoints import write

PUBLISHED = Path(__file__).parents[2] / "recipes" / "models"


def folder_of(folder: Path, model: str, of_text: dict[str, Any], **keys: Any) -> Path:
    config = json.loads((PUBLISHED / model / "config.json").read_text()) | keys
    config["text_config"] |= of_text
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_published_config(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3.5-397b-a17b", {"eos_token_id": 7})
    shape = model_shape(folder)
    facts = hf_facts(folder)
    assert shape.delta == DeltaShape(16, 64, 128, 128, kernel_size=4, full_every=4)
    assert (shape.num_experts, shape.moe_ffn_size, shape.num_shared_experts) == (512, 1024, 1)
    assert (facts.rotary_share, facts.rope_theta, facts.norm_topk_prob) == (0.25, 1e7, True)
    assert read_model(folder).context_tokens == 262_144
    assert end_token_ids(folder) == {7}
    folder_of(folder, "qwen3.5-397b-a17b", {"eos_token_id": 7}, eos_token_id=9)
    assert end_token_ids(folder) == {9}, "as SGLang, which looks into text_config last"
    assert without_tower(shape) == {"language_model_only": True}


def test_names_in_the_files(tmp_path: Path) -> None:
    shape = model_shape(folder_of(tmp_path, "qwen3.5-35b-a3b", {}))
    wrapper = family_of(shape).wrapper
    assert wrapper
    for name, in_files in (
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert name_in_files(shape, name) == in_files
        assert wrapper.from_files(in_files) == name
    assert wrapper.from_files("model.visual.pos_embed.weight") == "model.visual.pos_embed.weight"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"full_attention_interval": None}, "full_attention_interval"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"partial_rotary_factor": 2.0, "rope_parameters": None}, "partial_rotary_factor"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        hf_facts(folder_of(tmp_path, "qwen3.5-35b-a3b", keys))


def test_a_file_without_its_language_model(tmp_path: Path) -> None:
    folder_of(tmp_path, "qwen3.5-35b-a3b", {}, architectures=["Qwen3_5MoeForCausalLM"])
    with pytest.raises(UserError, match="or use one of .*Qwen3_5MoeForConditionalGeneration"):
        model_shape(tmp_path)
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="text_config is missing"):
        model_shape(tmp_path)


def params_of(folder: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Of the second of two ranks that split matrices and experts."""
    shards = megatron_map.shards(shape, TrainLayout(2, 2, 1, 2), 1)
    params = {name: torch.zeros(size) for name, size in param_table(shards).items()}
    load_hf(folder, shards, params, wrapper=family_of(shape).wrapper)
    return params


@pytest.mark.slow
def test_both_forms_of_the_experts_are_read(tmp_path: Path) -> None:
    """As published, and as transformers writes them."""
    stacked = write(tmp_path / "stacked", "qwen3.5-moe")
    shape = model_shape(stacked)
    tensors = load_file(stacked / "model.safetensors")
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").symlink_to(stacked / "config.json")
    for name in [name for name in tensors if ".experts." in name]:
        for item, matrices in enumerate(tensors.pop(name)):
            kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            parts = matrices.chunk(len(kinds))
            layer = name.rpartition(".")[0]
            for kind, part in zip(kinds, parts, strict=True):
                tensors[f"{layer}.{item}.{kind}.weight"] = part.contiguous()
    save_file(tensors, apart / "model.safetensors")
    assert check_hf(stacked, shape) == check_hf(apart, shape) == []
    expected = params_of(apart, shape)
    for name, param in params_of(stacked, shape).items():
        assert param.equal(expected[name]), name
        assert param.any() or not param.numel(), name


@pytest.mark.slow
def test_a_stack_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3.5-moe")
    shape = model_shape(folder)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(folder / "model.safetensors")
    for stack, says in (
        (tensors[name][:7], "no tensor model.language_model.layers.1.mlp.experts.7.gate_proj"),
        (tensors[name][:, :, 1:], r"mlp.experts.0.gate_proj.weight is \[64, 127\]"),
    ):
        save_file(tensors | {name: stack.contiguous()}, folder / "model.safetensors")
        errors = check_hf(folder, shape)
        assert len(errors) == 1
        with pytest.raises(UserError, match=says):
            raise errors[0]
