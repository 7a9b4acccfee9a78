"""One rank computes what transformers and torch compute: logprobs, and three steps of AdamW with auxiliary losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from megarl.parallel.packing import PackedRow, Split, pack
from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gradients import (
    DENOMINATOR,
    LR,
    VOCAB_SIZE,
    Tensors,
    check_gradients,
    check_weights,
    uneven_steps,
    whole,
)
from tests.parallel.precision import within
from tests.parallel.worlds import assign, ragged, recipe, run_world, weighted_loss

pytestmark = pytest.mark.slow

STEPS = 3
GRAD_CLIP, WEIGHT_DECAY = 1.0, 0.1
AUX, Z = 0.02, 1e-3
FAMILIES = ("qwen3-moe", "deepseek-v3")
TOP_K = {"qwen3-moe": 2, "deepseek-v3": 4}


def train(trainer: Any) -> dict[str, Any]:
    """Logprobs, then three steps on uneven micro-batches."""
    return uneven_steps(trainer, STEPS)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(family), family, vocab_size=VOCAB_SIZE, pad_token_id=None)


@pytest.fixture(scope="module")
def one_rank(path: Path) -> dict[str, Any]:
    losses = {"aux_loss": AUX, "z_loss": Z}
    run_recipe = recipe(
        path, TrainLayout(1, 1, 1, 1), grad_clip=GRAD_CLIP, weight_decay=WEIGHT_DECAY, **losses
    )
    return run_world(run_recipe, train)[0]


def hf_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_logprobs_equal_those_of_transformers(path: Path, one_rank: dict[str, Any]) -> None:
    model = hf_model(path).eval()
    for logp_T, sequence in zip(
        one_rank["logprobs"], assign(ragged(14, VOCAB_SIZE, seed=3), 0, 1, 1)[0], strict=True
    ):
        tokens_T = torch.from_numpy(sequence.token_ids_T)
        with torch.no_grad():
            logp_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
        expected_T = logp_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0]
        np.testing.assert_allclose(logp_T[1:], expected_T, atol=within(1e-4))


def test_steps_equal_transformers_and_torch(
    path: Path, family: str, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    """The same losses on transformers' model, clipped and stepped by torch: losses, gradients, weights."""
    model = hf_model(path)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [
        {"params": norms, "weight_decay": 0.0},
        {"params": others, "weight_decay": WEIGHT_DECAY},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    rows = [
        pack([sequence], split=Split(), device="cpu") for sequence in ragged(14, VOCAB_SIZE, seed=3)
    ]
    tokens = pad_sequence([row.token_ids_L for row in rows], batch_first=True)
    lengths = [len(row.token_ids_L) for row in rows]
    seen, gradients = watch_routers(model), []
    for metrics in one_rank["metrics"]:
        optimizer.zero_grad()
        seen.clear()
        # causal: the padding at the end of a row touches nothing before it
        logits = model(tokens).logits
        loss = (
            torch.stack([hf_loss(logits[index], row) for index, row in enumerate(rows)]).sum()
            / DENOMINATOR
        )
        aux, z = router_losses(seen, lengths, TOP_K[family], family)
        (loss + AUX * aux + Z * z).backward()
        gradients.append(gradient_of(model, tmp_path))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        losses = {name: metrics[name] for name in ("loss", "aux_loss", "z_loss", "grad_norm")}
        aux, z = aux / len(seen), z / len(seen)
        expected = {
            "loss": loss.item(),
            "aux_loss": aux.item(),
            "z_loss": z.item(),
            "grad_norm": norm.item(),
        }
        assert losses == pytest.approx(expected, rel=within(1e-4))
    learning = whole([one_rank["learning"]])
    check_gradients(learning.gradients, gradients)
    check_weights(learning)
    assert learning.after
    for bias in learning.after.keys() - gradients[0].keys():  # of the router; its rate is 0
        np.testing.assert_array_equal(learning.after[bias], learning.before[bias])


def gradient_of(model: Any, folder: Path) -> Tensors:
    """The gradients of all parameters, 2-D, by the names that weights have in the model's checkpoint."""
    from safetensors.numpy import load_file

    model.save_pretrained(
        folder, state_dict={name: param.grad for name, param in model.named_parameters()}
    )
    return {
        name: gradient.reshape(len(gradient), -1)
        for name, gradient in load_file(folder / "model.safetensors").items()
    }


def watch_routers(model: Any) -> list[torch.Tensor]:
    """The routers' logits [sequences, T, experts] of each layer, as the model runs."""
    seen: list[torch.Tensor] = []

    def note(gate: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        seen.append(
            torch.nn.functional.linear(inputs[0].reshape(14, -1, inputs[0].shape[-1]), gate.weight)
        )

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(note)
    return seen


def router_losses(
    layers: list[torch.Tensor], lengths: list[int], top_k: int, family: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Summed over layers) each sequence's balance, weighted by its tokens, and the mean of log^2 Z: by loops."""
    balance, z, tokens = torch.zeros(()), torch.zeros(()), sum(lengths)
    for logits in layers:
        num_experts = logits.shape[-1]
        for index, length in enumerate(lengths):
            sequence_logits = logits[index, :length]
            scores = (
                sequence_logits.softmax(-1)
                if family == "qwen3-moe"
                else sequence_logits.sigmoid() / sequence_logits.sigmoid().sum(-1, keepdim=True)
            )
            counts = torch.bincount(scores.topk(top_k).indices.flatten(), minlength=num_experts)
            share = counts / (top_k * length)
            balance = balance + length * num_experts * (share * scores.mean(0)).sum()
            z = z + (sequence_logits.logsumexp(-1) ** 2).sum()
    return balance / tokens, z / tokens


def hf_loss(logits_TV: torch.Tensor, row: PackedRow) -> torch.Tensor:
    logp_TV = logits_TV[: len(row.labels_L)].log_softmax(-1)
    logp_T = logp_TV.gather(-1, row.labels_L[:, None])[:, 0]
    return weighted_loss(logp_T, logp_T, logp_T.detach(), row.targets)[0]
