"""Samples of one response are learnt from to the last bit as they were before there were episodes.

The digests are those of the code before. Its two updates were the halves of the samples in their order, which are
planned here one by one, because updates of one step are dealt otherwise since. All numbers here are sums of few powers
of two, so that no order of addition and no fused instruction changes them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.algos import ALGORITHMS
from megarl.controller.samples import samples_of
from megarl.samples.summaries import summary
from megarl.training.batching import key_of, plan_updates, refs_of
from megarl.training.credit import with_token_advantages
from megarl.training.train_sequences import train_sequences
from megarl.types import Prompt, Sample, SampleGroup, SamplePart
from tests.samples.responses import response, with_row

GROUPS, SAMPLES, VERSION, DP = 12, 4, 4, 3
DIGESTS = {
    "grpo": "d73f3f430b459e09",
    "dapo": "417af0ed34764ae1",
    "dr_grpo": "b6d8db9f35f5c464",
    "rloo": "07f45894487edd6d",
    "gspo": "d73f3f430b459e09",
    "cispo": "417af0ed34764ae1",
    "remax": "0ad69491c038d3db",
    "reinforce_pp": "198d9d8319df5d18",
    "reinforce_pp_baseline": "8afad34b27abaf62",
    "on_policy_distillation": "05ee614d1fd26d78",
    "prime": "3d4f8f0ad2199b31",
    "ppo": "c84df239ffa11d8f",
    "vapo": "402dd4a164e8c4b1",
    "sft": "e5cf86e7dbcfc588",
}
FIELDS = (
    "token_ids_T",
    "loss_mask_T",
    "loss_weight_T",
    "engine_logp_T",
    "nll_weight_T",
    "is_stale_T",
    "experts_TMK",
)


def groups(seed: int) -> list[SampleGroup]:
    """Responses of 1 to 16 tokens, some of two versions; rewards of 0, 0.5 and 1."""
    rng = np.random.default_rng(seed)

    def sample(prompt: Prompt, length: int, is_baseline: bool) -> Sample:
        old = int(rng.integers(0, length))
        parts = (*([SamplePart(3, old)] if old else []), SamplePart(VERSION, length - old))
        logp, experts = (
            rng.integers(-8, 0, length).astype(np.float32),
            rng.integers(0, 8, (length, 2, 2), np.uint8),
        )
        return response(
            prompt.token_ids,
            rng.integers(0, 99, length),
            logp,
            "x" * length,
            finished=length < 16,
            parts=parts,
            routed_experts=experts,
            is_baseline=is_baseline,
        )

    def group(number: int) -> SampleGroup:
        prompt = Prompt(
            str(number), "", tuple(rng.integers(0, 99, rng.integers(1, 30)).tolist()), "7"
        )
        made = tuple(
            sample(prompt, int(2 ** rng.integers(0, 5)), index == SAMPLES)
            for index in range(SAMPLES + 1)
        )
        rewards_G = (rng.integers(0, 3, SAMPLES + 1) / 2).astype(np.float32)
        return SampleGroup(prompt, made, rewards_G, rewards_G > 0.5)

    return [group(number) for number in range(GROUPS)]


def learnt(name: str, seed: int) -> tuple[list[Any], list[Any]]:
    """The plan of a step, and the arrays of its sequences, as plain tuples and bytes."""
    row, made = ALGORITHMS[name], groups(seed)
    hparams = replace(
        row.hyperparameters, whiten=False, gae_lambda=0.5, critic_lambda=None, positive_nll=0.5
    )
    hparams = replace(hparams, lambda_alpha=2.0 if hparams.lambda_alpha else 0.0)
    refs = samples_of([summary(_without_experts(group)) for group in made], name, version=VERSION)
    middle = len(refs) // 2
    plans = [
        plan
        for half in (refs[:middle], refs[middle:])
        for plan in plan_updates(
            half, updates=1, dp=DP, token_budget=64, aggregation=hparams.aggregation, longest_response=16, align=4,
            work=lambda length: float(16 * length + length**2), multiple=2, bubble_micro_batches=1.5,
        )
    ]  # fmt: skip
    arrays: list[Any] = []
    for rank in range(DP):
        share = [replace(one, micro_batches=(one.micro_batches[rank],)) for one in plans]
        sequences = [
            one
            for update in share
            for batch in train_sequences(
                update.micro_batches[0],
                dict(enumerate(made)),
                hparams.aggregation,
                update.nll_weight(0.5),
            )
            for one in batch
        ]
        own = refs_of(share)
        rng = np.random.default_rng([seed, rank])
        values = {
            key_of(ref): (rng.integers(-8, 8, ref.response_length) / 4).astype(np.float32)
            for ref in own
        }
        pays = (
            [(rng.integers(-8, 8, ref.length) / 4).astype(np.float32) for ref in own]
            if hparams.pays_kl
            else None
        )
        alone = {"sum_over_all": lambda one: one, "max_over_all": lambda one: one}
        for one in with_token_advantages(row, hparams, own, sequences, values, pays, **alone):
            arrays += [
                (one.reward, one.outcome),
                *(_bytes(getattr(one, field)) for field in FIELDS),
            ]
            arrays.append(_bytes(one.advantage_T))
    return [_plan(one) for one in plans], arrays


def _without_experts(group: SampleGroup) -> SampleGroup:
    """For the check of a group's tokens: here experts are of the response alone, as when the digests were made."""
    samples = tuple(with_row(sample, routed_experts=None) for sample in group.samples)
    return replace(group, samples=samples)


def _bytes(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype.str, array.shape, array.tobytes())


def _plan(update: Any) -> Any:
    of_ranks = [
        [[(r.group, r.sample, r.length, r.response_length, r.reward, r.advantage, r.num_stale) for r in batch]
         for batch in rank] for rank in update.micro_batches
    ]  # fmt: skip
    return of_ranks, update.denominator, update.tokens, update.loss_tokens, update.correct_tokens


def digest(name: str) -> str:
    """Of two steps' plans and arrays."""
    return hashlib.sha256(repr([learnt(name, seed) for seed in (1, 2)]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_plans_and_arrays_are_what_they_were(name: str) -> None:
    assert digest(name) == DIGESTS[name]
