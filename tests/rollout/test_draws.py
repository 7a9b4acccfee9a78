"""No two that sample draw the same: attention groups, engines; and the ranks of one group draw together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.sglang.deterministic import generator_seed
from megarl.rollout.sglang.engine import Engine
from megarl.types.sampling import Sampling
from tests.rollout.draws import LEAST_P, MOST_DEVIATIONS, check_draws, chi_square_p, deviations
from tests.rollout.sglang.test_engine import TOLERANCE, sample_all, worst_diff
from tests.rollout.test_worker import recipe
from tests.tiny_engines import Reference


def test_every_attention_group_of_every_engine_has_a_seed_of_its_own() -> None:
    engines = [engine_settings(recipe("somewhere"), index).seed for index in range(64)]
    seeds = {generator_seed(engine, group) for engine, group in product(engines, range(32))}
    assert len(seeds) == 64 * 32
    assert all(0 <= seed < 2**32 for seed in seeds), "NumPy takes no more"


def test_the_statistics_tell_repeated_draws_and_those_of_another_temperature() -> None:
    """Draws of NumPy's own generator, in which engines have no part."""
    rng = np.random.default_rng(1)
    logits_N = 1.1 * rng.normal(size=47)
    probs_N, cooler_N = (
        np.exp(logits_N / temperature) / np.exp(logits_N / temperature).sum()
        for temperature in (1.0, 0.9)
    )
    drawn_GS = rng.choice(47, size=(1000, 8), p=probs_N)
    counts_N = np.bincount(drawn_GS.ravel(), minlength=47)
    assert chi_square_p(counts_N, probs_N) > LEAST_P > chi_square_p(counts_N, cooler_N)
    assert deviations(drawn_GS, probs_N) < MOST_DEVIATIONS
    drawn_GS[:200, 4:] = drawn_GS[:200, :4]
    assert deviations(drawn_GS, probs_N) > MOST_DEVIATIONS, "one group in five repeats itself"


@pytest.mark.slow
def test_engines_and_their_attention_groups_draw_independently_and_ranks_together(
    checkpoint: Path, build_engine: Callable[..., Engine], reference: Reference
) -> None:
    """Two engines of one run, the first with two attention groups of two ranks each.

    Unverified on a GPU.

    rollout/sglang/scheduler.py _patch_scheduler, engine logprobs at rollout.temperature: torch's CUDA generator
    seeded for each attention group, which FlashInfer's samplers draw by too; SGLang's logprobs as
    log(softmax(logits / T)). To check first: `tests/rollout/test_draws.py` with two attention groups; the logprob
    gap of a run at temperature 0.7.
    """
    seeds = [engine_settings(recipe(str(checkpoint)), index).seed for index in range(2)]
    engines = [build_engine(4, 1, dp=2, seed=seeds[0]), build_engine(1, 1, seed=seeds[1])]
    check_draws(engines, reference)
    groups = asyncio.run(sample_all(engines[0], Sampling(4, 12, 1.3)))
    assert worst_diff(groups, reference, 1.3) < TOLERANCE, (
        "ranks that draw other tokens have other caches"
    )
    for engine in engines:
        engine.shutdown()
