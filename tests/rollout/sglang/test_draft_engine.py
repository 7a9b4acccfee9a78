"""An engine that drafts with the model's own prediction layer: its samples are still the model's, fewer steps each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.device import DEVICE
from megarl.model.hf_config import model_shape
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.sglang.engine import Engine
from megarl.types import Sample
from megarl.types.sampling import Sampling
from tests.end_to_end.test_one_gpu import LATENT
from tests.parallel import checkpoints
from tests.rollout.draws import MOST_DEVIATIONS
from tests.rollout.sglang.test_engine import BFLOAT16, mean_diff
from tests.tiny_engines import Reference, write_tokenizer

ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="SGLang's draft models run on a GPU")
PROMPT = [3, 7, 15, 8, 18, 4]


def surprise(logits_TN: torch.Tensor, token_ids_T: torch.Tensor) -> tuple[float, float]:
    """(sum of log p(x) + entropy over the tokens, its variance): a sum of mean 0 where each x was drawn from its p."""
    logp_TN = logits_TN.double().log_softmax(-1)
    p_TN = logp_TN.exp()
    mean_T = (p_TN * logp_TN).sum(-1)
    variance_T = (p_TN * logp_TN.square()).sum(-1) - mean_T.square()
    drawn_T = logp_TN.gather(1, token_ids_T[:, None])[:, 0]
    return float((drawn_T - mean_T).sum()), float(variance_T.sum())


def deviation(found: list[tuple[float, float]]) -> float:
    """Of all sums together, in standard deviations."""
    return sum(total for total, _ in found) / sum(variance for _, variance in found) ** 0.5


def test_the_statistic_tells_drawn_tokens_from_the_most_probable_ones() -> None:
    """Tokens of torch's own generator, in which engines have no part."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 47, generator=generator)
    drawn = logits.softmax(-1).multinomial(1, generator=generator)[:, 0]
    assert abs(deviation([surprise(logits, drawn)])) < MOST_DEVIATIONS
    half_greedy = torch.where(torch.arange(2000) % 2 == 0, drawn, logits.argmax(-1))
    assert deviation([surprise(logits, half_greedy)]) > MOST_DEVIATIONS
    assert deviation([surprise(1.5 * logits, drawn)]) < -MOST_DEVIATIONS, (
        "drawn at another temperature"
    )


@pytest.mark.slow
@ON_GPU
@pytest.mark.parametrize("draft", [1, 3])
def test_samples_and_logprobs_are_those_of_transformers(
    tmp_path: Path, build_engine: Callable[..., Engine], draft: int
) -> None:
    """Unverified on a GPU.

    rollout/sglang/arguments.py _draft_arguments, rollout/sglang/weight_loader.py load: `rollout.engine.draft`:
    SGLang's draft model was seen on the meta device alone (`tests/resharding/test_real_engines.py`), and the joint
    exchange with modules of ours; the rest was read in SGLang's source, above all that samples and their logprobs
    stay the model's. To check first: the draft model's rotary table after memory was released (the loader refuses
    buffers of its own); `rollout/accepted` of DeepSeek-V3; with DP attention, DeepEP and `train.replay` r3.
    """
    folder = checkpoints.write(tmp_path, "deepseek-v3", mtp_layers=1, **LATENT)
    write_tokenizer(folder)
    layout = EngineLayout(1, 1, 1, draft=draft)
    assert layout.errors(model_shape(folder), 1) == []
    engine = build_engine(layout=layout, model_path=str(folder), dtype="bfloat16")
    reference, temperature = Reference(folder), 1.3
    samples = asyncio.run(engine.generate(PROMPT, Sampling(64, 32, temperature)))
    assert mean_diff(samples, reference, PROMPT, temperature) < BFLOAT16
    surprises = []
    for sample in samples:
        response = sample.only_row.response_ids_T.tolist()
        logits = reference.logits([*PROMPT, *response])[len(PROMPT) - 1 : -1] / temperature
        surprises.append(surprise(logits, torch.tensor(response)))
    assert abs(deviation(surprises)) < MOST_DEVIATIONS
    check_counts(samples, draft)


def check_counts(samples: list[Sample], draft: int) -> None:
    """Each step of the model gives a token of its own, and at most the drafts before it."""
    lengths = np.array([len(sample.only_row.response_ids_T) for sample in samples])
    verifications = np.array([sample.verifications for sample in samples])
    assert (lengths - 1 <= (1 + draft) * verifications).all()
    assert 1 <= (lengths - 1).sum() / verifications.sum() <= 1 + draft
