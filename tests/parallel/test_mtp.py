"""Qwen3-Next's layer of multi-token prediction: its loss is that of transformers' modules, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gradients import LINEAR, VOCAB_SIZE, check_gradients, uneven_steps, whole
from tests.parallel.precision import within
from tests.parallel.worlds import ragged, recipe, run_world

pytestmark = pytest.mark.slow

LAYERS = 4


def train(trainer: Any) -> dict[str, Any]:
    return uneven_steps(trainer, 1)


def with_one_more_layer(path: Path, folder: Path) -> Any:
    """transformers' model of the checkpoint in which the layer ahead is the last one of the decoder."""
    from transformers import Qwen3NextForCausalLM

    folder.mkdir()
    config = json.loads((path / "config.json").read_text())
    config["layer_types"].append("full_attention")
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("mtp.layers.0.", f"model.layers.{LAYERS}."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(hidden, weight.shape, 1 + weight, eps)


@torch.no_grad()
def loss_ahead(path: Path, folder: Path) -> float:
    """The mean of -log p of the tokens two places ahead, by the order of SGLang's models/qwen3_next_mtp.py."""
    model = with_one_more_layer(path, folder)
    weights = load_file(path / "model.safetensors")
    (eps, total, count) = (model.config.rms_norm_eps, 0.0, 0)
    inner = model.model
    ahead = inner.layers[LAYERS]
    inner.layers = inner.layers[:LAYERS]
    inner.config.num_hidden_layers = LAYERS
    for sequence in ragged(14, VOCAB_SIZE, seed=3):
        tokens_T = torch.from_numpy(sequence.token_ids_T)
        count += int(sequence.loss_mask_T.sum())
        if len(tokens_T) < 3:
            continue
        hidden = inner(tokens_T[None]).last_hidden_state[:, :-1]
        embedded = inner.embed_tokens(tokens_T[None, 1:])
        both = [
            norm(embedded, weights["mtp.pre_fc_norm_embedding.weight"], eps),
            norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"], eps),
        ]
        projected = torch.cat(both, -1) @ weights["mtp.fc.weight"].T
        positions = torch.arange(projected.shape[1])[None]
        turned = inner.rotary_emb(projected, positions)
        out = ahead(projected, position_embeddings=turned)
        logits = norm(out, weights["mtp.norm.weight"], eps) @ weights["lm_head.weight"].T
        logp_T = logits[0, :-1].log_softmax(-1).gather(-1, tokens_T[2:, None])[:, 0]
        total -= float(logp_T[torch.from_numpy(sequence.loss_mask_T)[2:]].sum())
    return total / count


def test_the_loss_of_the_layer_ahead(tmp_path: Path) -> None:
    """On one rank it is transformers', and TP2 EP2 has the same losses and gradients.

    One step, because later ones begin with weights in which Adam has made rounding large enough to turn a router.
    """
    keys: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": None}
    path = write(tmp_path / "model", "qwen3-next", mtp_layers=1, **keys)
    settings = {"grad_clip": 1.0, "weight_decay": 0.1, "mtp_loss": 0.1, "aux_loss": 0.02}
    (alone,) = run_world(recipe(path, TrainLayout(1, 1, 1, 1), **settings), train)
    (metrics,) = alone["metrics"]
    assert metrics["mtp_loss"] == pytest.approx(
        loss_ahead(path, tmp_path / "longer"), rel=within(1e-5)
    )
    ranks = run_world(recipe(path, TrainLayout(2, 2, 1, 2), **settings), train)
    for rank in ranks:
        assert rank["metrics"][0] == pytest.approx(metrics, rel=within(1e-4))
    expected = whole([alone["learning"]])
    gradients = whole([rank["learning"] for rank in ranks]).gradients
    check_gradients(gradients, expected.gradients, LINEAR)
    of_layer = [name for name in expected.gradients[0] if name.startswith("mtp.")]
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= {
        *of_layer
    }
    assert all(np.abs(expected.gradients[0][name]).max() > 0 for name in of_layer)
