"""Whether an engine's samples are independent draws from the model's own distribution, which transformers states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from megarl.rollout.sglang.engine import Engine
from megarl.types.sampling import Sampling
from tests.parallel.checkpoints import EOS
from tests.tiny_engines import Reference

PROMPT = [3, 7, 15, 8, 18, 4]
NUM_GROUPS, NUM_SAMPLES, NUM_TOKENS = 1000, 8, 2
LEAST_P, MOST_DEVIATIONS = 1e-7, 5.3  # one right engine in ten million fails by chance
FEWEST_EXPECTED = 5.0  # draws of a cell of the chi-square test; rarer answers are counted together


def check_draws(
    engines: Sequence[Engine], reference: Reference, *, temperature: float = 1.0
) -> None:
    """1,000 groups of 8 answers of two tokens, each group's shared out over the engines."""
    answers_GS = asyncio.run(_drawn(engines, temperature))
    probs_VV = answer_probs(reference, temperature)
    firsts_V, probs_V = (
        np.bincount(answers_GS.ravel() // len(probs_VV), minlength=len(probs_VV)),
        probs_VV.sum(1),
    )
    answers_N = np.bincount(answers_GS.ravel(), minlength=probs_VV.size)
    assert chi_square_p(firsts_V, probs_V) > LEAST_P, "the first token of an answer"
    assert chi_square_p(answers_N, probs_VV.ravel()) > LEAST_P, "whole answers"
    assert deviations(answers_GS, probs_VV.ravel()) < MOST_DEVIATIONS, (
        "the number of distinct answers in a group"
    )


async def _drawn(engines: Sequence[Engine], temperature: float) -> np.ndarray:
    """[groups, samples] number of each answer: first token x vocabulary + second token, or the first token twice."""
    each = NUM_SAMPLES // len(engines)
    calls = [
        engine.generate(PROMPT, Sampling(each, NUM_TOKENS, temperature, stream=(1, group, number)))
        for group in range(NUM_GROUPS)
        for number, engine in enumerate(engines)
    ]
    tokens = [
        sample.only_row.response_ids_T
        for samples in await asyncio.gather(*calls)
        for sample in samples
    ]
    return np.array([int(ids[0]) * 47 + int(ids[-1]) for ids in tokens]).reshape(
        NUM_GROUPS, NUM_SAMPLES
    )


def answer_probs(reference: Reference, temperature: float) -> np.ndarray:
    """[first token, second token] of every answer; an answer that ends with its first token has it twice."""
    first_V = (reference.logits(PROMPT)[-1].double() / temperature).softmax(-1)
    with torch.no_grad():
        rows = torch.tensor([[*PROMPT, token] for token in range(len(first_V))])
        second_VV = (reference.model(rows).logits[:, -1].double() / temperature).softmax(-1)
    second_VV[EOS] = torch.nn.functional.one_hot(torch.tensor(EOS), len(first_V))
    return (first_V[:, None] * second_VV).numpy()


def chi_square_p(counts_N: np.ndarray, probs_N: np.ndarray) -> float:
    """The probability of counts that are at least as far from what is expected (Pearson's test)."""
    expected_N = counts_N.sum() * probs_N
    is_rare_N = expected_N < FEWEST_EXPECTED
    counts, expected = (
        np.append(values_N[~is_rare_N], values_N[is_rare_N].sum())
        for values_N in (counts_N, expected_N)
    )
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return float(
        torch.special.gammaincc(torch.tensor((used.sum() - 1) / 2.0), torch.tensor(statistic / 2.0))
    )


def deviations(answers_GS: np.ndarray, probs_N: np.ndarray) -> float:
    """Of the mean number of distinct answers in a group from that of independent draws, in its standard deviations."""
    absent_N = (1 - probs_N) ** answers_GS.shape[1]
    # neither of two is in a group
    pairs_NN = np.maximum(1 - probs_N[:, None] - probs_N, 0) ** answers_GS.shape[1]
    variance = pairs_NN.sum() - np.trace(pairs_NN) + absent_N.sum() - absent_N.sum() ** 2
    distinct = np.mean([len(set(group)) for group in answers_GS.tolist()])
    return float(abs(distinct - (1 - absent_N).sum()) / np.sqrt(variance / len(answers_GS)))
