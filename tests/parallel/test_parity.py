"""Every layout computes what one rank computes, and one rank computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from megarl.parallel.layout import TrainLayout
from megarl.parallel.sequences import PackedRow, pack
from megarl.types import TrainSequence
from tests.parallel.conftest import VOCAB_SIZE
from tests.parallel.worlds import assemble, deal, ragged, recipe, rectangles, run_world, weighted_loss

ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {
    "tp4, 2 key/value heads": TrainLayout(4, 4, 1, 1),
    "dp2": TrainLayout(2, 1, 1, 1),
    "tp2": TrainLayout(2, 2, 1, 1),
    "tp2ep2": TrainLayout(2, 2, 1, 2),
    "pp2": TrainLayout(2, 1, 2, 1),
    "dp2ep2": TrainLayout(2, 1, 1, 2),
    "tp2pp2ep2": TrainLayout(4, 2, 2, 2),
}
STEPS, DENOMINATOR, LR = 3, 97.0, 1e-3
GRAD_CLIP, WEIGHT_DECAY = 1.0, 0.1


def train(trainer: Any) -> dict[str, Any]:
    """Logprobs, then three steps on uneven micro-batches, and the weights after them."""
    at = trainer.layout.coords(trainer.rank)
    sequences = ragged(14, VOCAB_SIZE, seed=3)
    micro_batches = deal(sequences, at.dp, trainer.layout.dp, micro_batches=3)
    return {
        "dp": at.dp,
        "lengths": [len(one.token_ids_T) for batch in micro_batches for one in batch],
        "logits": logits(trainer, micro_batches[0]) if trainer.layout == ONE_RANK else None,
        "logprobs": trainer.logprobs(micro_batches),
        "metrics": [trainer.train_step(micro_batches, DENOMINATOR, LR, weighted_loss) for _ in range(STEPS)],
        "weights": rectangles(trainer),
    }


def logits(trainer: Any, batch: list[TrainSequence]) -> np.ndarray:
    """[T, vocabulary] of one packed row, from the model alone."""
    from megarl.parallel import pipeline

    row = pack(batch, multiple=1, device="cpu")
    with torch.no_grad():
        output, _ = pipeline._forward(lambda *_: None, VOCAB_SIZE, iter([row]), trainer._model)  # type: ignore[arg-type]
    return output[0, :, :VOCAB_SIZE].numpy()


def run(path: Path, layout: TrainLayout) -> list[dict[str, Any]]:
    return run_world(recipe(path, layout, grad_clip=GRAD_CLIP, weight_decay=WEIGHT_DECAY), train)


@pytest.fixture(scope="module")
def one_rank(checkpoint_path: Path) -> dict[str, Any]:
    return run(checkpoint_path, ONE_RANK)[0]


def hf_logprobs(path: Path) -> list[np.ndarray]:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    arrays = []
    for one in deal(ragged(14, VOCAB_SIZE, seed=3), 0, 1, micro_batches=1)[0]:
        tokens_T = torch.from_numpy(one.token_ids_T)
        with torch.no_grad():
            logp_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
        chosen_T = logp_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0]
        arrays.append(np.concatenate([[0.0], chosen_T.numpy()]))
    return arrays


@pytest.mark.slow
def test_one_rank_equals_transformers(checkpoint_path: Path, one_rank: dict[str, Any]) -> None:
    expected = hf_logprobs(checkpoint_path)
    for mine, theirs in zip(one_rank["logprobs"], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.slow
def test_one_rank_has_the_logits_of_transformers(checkpoint_path: Path, one_rank: dict[str, Any]) -> None:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint_path, dtype=torch.float32).eval()
    batch = deal(ragged(14, VOCAB_SIZE, seed=3), 0, 1, micro_batches=3)[0]
    with torch.no_grad():
        expected = [model(torch.from_numpy(one.token_ids_T)[None]).logits[0] for one in batch]
    np.testing.assert_allclose(one_rank["logits"], torch.cat(expected).numpy(), atol=1e-4)


@pytest.mark.slow
def test_steps_equal_transformers_and_torch(checkpoint_path: Path, one_rank: dict[str, Any], tmp_path: Path) -> None:
    """The same loss on transformers' model, clipped and stepped by torch: loss, gradient norm, all weights."""
    from safetensors.numpy import load_file
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint_path, dtype=torch.float32)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": WEIGHT_DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    rows = [pack([one], multiple=1, device="cpu") for one in ragged(14, VOCAB_SIZE, seed=3)]
    tokens = pad_sequence([row.token_ids_T for row in rows], batch_first=True)
    for metrics in one_rank["metrics"]:
        optimizer.zero_grad()
        logits = model(tokens).logits  # causal: the padding at the end of a row touches nothing before it
        loss = torch.stack([hf_loss(logits[index], row) for index, row in enumerate(rows)]).sum() / DENOMINATOR
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    check_weights(
        assemble([one_rank["weights"]]), {name: tensor.reshape(len(tensor), -1) for name, tensor in weights.items()}
    )


def hf_loss(logits_TV: torch.Tensor, row: PackedRow) -> torch.Tensor:
    logp_TV = logits_TV[: len(row.labels_T)].log_softmax(-1)
    logp_T = logp_TV.gather(-1, row.labels_T[:, None])[:, 0]
    return weighted_loss(logp_T, logp_T.detach(), row.targets)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(checkpoint_path: Path, one_rank: dict[str, Any], name: str) -> None:
    layout = LAYOUTS[name]
    ranks = run(checkpoint_path, layout)
    for rank, result in enumerate(ranks):
        is_last = layout.coords(rank).pp == layout.pp - 1
        check_logprobs(result, one_rank, layout.dp, is_last)
        for mine, expected in zip(result["metrics"], one_rank["metrics"], strict=True):
            assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert (mine.keys() == expected.keys()) == is_last
            if is_last:
                assert mine == pytest.approx(expected, rel=1e-4)
    last = [result["metrics"] for rank, result in enumerate(ranks) if layout.coords(rank).pp == layout.pp - 1]
    assert all(metrics == last[0] for metrics in last)
    check_weights(assemble([result["weights"] for result in ranks]), assemble([one_rank["weights"]]))


def check_logprobs(result: dict[str, Any], one_rank: dict[str, Any], dp: int, is_last: bool) -> None:
    if not is_last:
        assert result["logprobs"] is None
        return
    for mine, expected in zip(result["logprobs"], one_rank["logprobs"][result["dp"] :: dp], strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)


def check_weights(mine: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Adam moves a weight by about lr a step whatever the gradient's size, so compare against that distance."""
    assert mine.keys() == expected.keys()
    for tensor, values in mine.items():
        difference = np.abs(values - expected[tensor])
        assert np.quantile(difference, 0.999) < 1e-2 * LR * STEPS, tensor
        assert np.linalg.norm(difference) < 1e-4 * np.linalg.norm(expected[tensor]), tensor
