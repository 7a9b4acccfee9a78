"""Kimi-K2.5 as published: a checkpoint of DeepSeek-V3 as the language model, and a small vision tower beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"kimi-k25": "KimiK25ForConditionalGeneration"}
# the folder with the language model alone, as transformers reads it
_TEXT = "text"
_WEIGHTS = "model.safetensors"
_HIDDEN = 32
_FFN = 64
_PATCH = 14
_POSITIONS = 4


def wrap(folder: Path, architecture: str) -> None:
    """Make a checkpoint of the whole model of that of its language model, which goes into a folder inside."""
    text = folder / _TEXT
    text.mkdir()
    for name in ("config.json", _WEIGHTS):
        (folder / name).rename(text / name)
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    whole = {
        "architectures": [architecture],
        "model_type": "kimi_k25",
        "dtype": config["dtype"],
        "eos_token_id": config["eos_token_id"],
        "text_config": config,
        "vision_config": vision_config(config["hidden_size"]),
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
    weights = load_file(text / _WEIGHTS)
    named = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    tower = _tower(config["hidden_size"])
    save_file(named | tower, folder / _WEIGHTS, metadata={"format": "pt"})


def of_text(folder: Path) -> Path:
    """The folder that transformers reads: of a wrapped model its language model."""
    return folder / _TEXT if (folder / _TEXT).exists() else folder


def vision_config(text_hidden_size: int) -> dict[str, Any]:
    """SGLang's tower reads the names of transformers, its projector those of the publisher."""
    sizes = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    return {
        **sizes,
        **{f"vt_{name}": size for name, size in sizes.items()},
        "patch_size": _PATCH,
        "init_pos_emb_height": _POSITIONS,
        "init_pos_emb_width": _POSITIONS,
        "text_hidden_size": text_hidden_size,
    }


def _tower(text_hidden_size: int) -> dict[str, torch.Tensor]:
    """The tensors of a tower of one layer and of its projector, in bfloat16 as published."""
    wide = 4 * _HIDDEN
    layers = {
        "encoder.blocks.0.norm0": (_HIDDEN,),
        "encoder.blocks.0.norm1": (_HIDDEN,),
        "encoder.blocks.0.wqkv": (3 * _HIDDEN, _HIDDEN),
        "encoder.blocks.0.wo": (_HIDDEN, _HIDDEN),
        "encoder.blocks.0.mlp.fc0": (_FFN, _HIDDEN),
        "encoder.blocks.0.mlp.fc1": (_HIDDEN, _FFN),
        "encoder.final_layernorm": (_HIDDEN,),
        "patch_embed.proj": (_HIDDEN, 3, _PATCH, _PATCH),
    }
    sizes: dict[str, tuple[int, ...]] = {f"vision_tower.{name}": layers[name] for name in layers}
    sizes["mm_projector.pre_norm"] = (_HIDDEN,)
    sizes["mm_projector.proj.0"] = (wide, wide)
    sizes["mm_projector.proj.2"] = (text_hidden_size, wide)
    weights = {f"{name}.weight": torch.randn(size) for name, size in sizes.items()}
    biases = {f"{name}.bias": torch.randn(size[0]) for name, size in sizes.items()}
    positions = torch.randn(_POSITIONS, _POSITIONS, _HIDDEN)
    tower = weights | biases | {"vision_tower.patch_embed.pos_emb.weight": positions}
    return {name: tensor.bfloat16() for name, tensor in tower.items()}
