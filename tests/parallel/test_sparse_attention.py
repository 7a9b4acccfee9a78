"""Attention to the keys that an indexer chooses, beside what transformers and all layouts say of it (test_families)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megarl.model.shape import IndexerShape
from megarl.parallel import sparse_attention
from megarl.parallel.param_names import named_parameters
from megarl.parallel.sparse_attention import Indexer, RotaryTurn, chosen_keys
from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gradients import VOCAB_SIZE, steps, uneven_part
from tests.parallel.precision import within
from tests.parallel.worlds import recipe, run_world

ONE_RANK = TrainLayout(1, 1, 1, 1)


@pytest.mark.parametrize("block_numbers", [1, 1 << 25], ids=["one by one", "all at once"])
def test_the_keys_of_the_largest_scores_are_chosen_inside_a_segment(block_numbers: int) -> None:
    torch.manual_seed(0)
    bounds = [0, 3, 12, 13, 30]
    top_k = 4
    q, k, weights = torch.randn(30, 5, 8), torch.randn(30, 8), torch.randn(30, 5)
    own = torch.randperm(30)[:20]  # as a rank has some of a row's tokens
    with patch.object(sparse_attention, "_BLOCK_NUMBERS", block_numbers):
        chosen = chosen_keys(q[own], weights[own], k, own, bounds, top_k)
    for row, place in enumerate(own.tolist()):
        start = max(bound for bound in bounds if bound <= place)
        scores = {
            key: float((weights[place] * (q[place] @ k[key]).relu()).sum())
            for key in range(start, place + 1)
        }
        best = sorted(scores, key=lambda key: -scores[key])[:top_k]
        found = {start + key for key in chosen[row].tolist() if start + key <= place}
        assert found == {*best}


@pytest.mark.parametrize("interleaved_rope", [False, True], ids=["halves", "neighbours"])
def test_queries_and_keys_are_turned_by_their_positions(interleaved_rope: bool) -> None:
    """Products of pairs, as complex numbers, turn by the difference of the positions."""
    torch.manual_seed(0)
    config: Any = SimpleNamespace(q_lora_rank=10, hidden_size=12, params_dtype=torch.float32)
    indexer = Indexer(IndexerShape(2, 8, 4, interleaved_rope), config)
    assert not any(param.requires_grad for param in indexer.parameters())
    frequencies = torch.tensor([0.5, 0.05])  # of the 4 first numbers
    angles = torch.tensor([3.0, 7.0])[:, None] * torch.cat([frequencies, frequencies])
    turn = RotaryTurn(angles.cos()[:, None], angles.sin()[:, None])
    latent, hidden = torch.randn(2, 10), torch.randn(2, 12)
    scores = torch.einsum("qhd,kd->qhk", indexer.queries(latent, turn), indexer.keys(hidden, turn))
    plain_q = indexer.wq_b(latent).unflatten(-1, (2, 8))
    plain_k = indexer.k_norm(indexer.wk(hidden))
    pairs = [(0, 1), (2, 3)] if interleaved_rope else [(0, 2), (1, 3)]
    for query in range(2):
        for key in range(2):
            q, k = plain_q[query], plain_k[key]
            expected = q[:, 4:] @ k[4:]
            for (first, second), frequency in zip(pairs, frequencies, strict=True):
                turned = torch.polar(torch.ones(()), 4.0 * (query - key) * frequency)
                product = torch.complex(q[:, first], q[:, second]) * turned
                expected = expected + (product * torch.complex(k[first], k[second]).conj()).real
            torch.testing.assert_close(scores[query, :, key], expected)


def learned(trainer: Any) -> tuple[list[np.ndarray], dict[str, tuple[bool, bool]]]:
    """Log-probabilities, and by parameter whether a step trains it, and whether the step has changed it."""
    part = uneven_part(trainer)
    logprobs = trainer.token_outputs(part.micro_batches)
    chunks = trainer._model.chunks
    before = {name: param.detach().clone() for name, param in named_parameters(chunks)}
    steps(trainer, part, 1)
    changes = {
        name: (param.requires_grad, not torch.equal(param, before[name]))
        for name, param in named_parameters(chunks)
    }
    return logprobs, changes


@pytest.mark.slow
def test_sequences_of_no_more_keys_have_dense_attention_and_the_indexer_is_not_trained(
    tmp_path: Path,
) -> None:
    """Dense attention is that of the same weights as a DeepSeek-V3."""
    results = {}
    for name, top_k in (("sparse", 6), ("short", 32)):
        path = write(
            tmp_path / name,
            "deepseek-v3.2",
            index_topk=top_k,
            vocab_size=VOCAB_SIZE,
            pad_token_id=None,
        )
        results[name] = path
    dense = tmp_path / "dense"
    dense.mkdir()
    config = json.loads((results["short"] / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    config |= {"layer_types": None, "num_experts": None}
    (dense / "config.json").write_text(json.dumps(config))
    (dense / "model.safetensors").symlink_to(results["short"] / "model.safetensors")
    results["dense"] = dense
    found = {name: run_world(recipe(path, ONE_RANK), learned)[0] for name, path in results.items()}
    logprobs = {name: np.concatenate(of_all) for name, (of_all, _) in found.items()}
    np.testing.assert_array_equal(logprobs["short"], logprobs["dense"])
    assert np.abs(logprobs["sparse"] - logprobs["dense"]).max() > 100 * within(1e-4)
    for name, (is_trained, has_changed) in found["sparse"][1].items():
        assert is_trained == has_changed == (".indexer." not in name), name
