"""Batches: every sample once, budgets kept, ranks balanced, and the rows that come out of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batching import SampleRef, plan_updates, train_sequence
from megarl.types import Prompt, Sample, SampleGroup

BUDGET = 64


def _refs(lengths: list[int]) -> list[SampleRef]:
    return [SampleRef(group=i // 4, sample=i % 4, length=n, response_length=n - 1, advantage=0.0)
            for i, n in enumerate(lengths)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=8, max_size=80), st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_every_sample_lands_once_within_the_budget(lengths, dp, updates):
    samples = _refs(lengths)
    plans = plan_updates(samples, updates=updates, dp=dp, token_budget=BUDGET, mean_over="tokens")
    landed = [ref for plan in plans for rank in plan.micro_batches for batch in rank for ref in batch]
    assert sorted(landed, key=lambda r: (r.group, r.sample)) == samples
    for plan in plans:
        assert len({len(rank) for rank in plan.micro_batches}) == 1, "expert all-to-all needs equal counts"
        for rank in plan.micro_batches:
            assert all(batch and sum(ref.length for ref in batch) <= BUDGET for batch in rank)
        assert plan.denominator == sum(ref.response_length for rank in plan.micro_batches for b in rank for ref in b)


def test_order_of_arrival_does_not_change_the_shares():
    samples = _refs([5, 9, 30, 2, 7, 12, 8, 21])
    plan = [plan_updates(order, updates=1, dp=2, token_budget=BUDGET, mean_over="sequences")
            for order in (samples, samples[::-1])]
    assert plan[0] == plan[1]
    assert plan[0][0].denominator == 8


def test_ranks_are_balanced_on_long_tailed_lengths():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 2048).astype(int) + 2, 8000)
    plan = plan_updates(_refs(list(lengths)), updates=1, dp=16, token_budget=8192, mean_over="tokens")[0]
    loads = [sum(ref.length for batch in rank for ref in batch) for rank in plan.micro_batches]
    assert max(loads) / (sum(loads) / len(loads)) < 1.02


@pytest.mark.parametrize(("lengths", "message"), [([2], "each of 2"), ([2, 65], "exceeds")])
def test_impossible_batches_say_why(lengths, message):
    with pytest.raises(ValueError, match=message):
        plan_updates(_refs(lengths), updates=1, dp=2, token_budget=BUDGET, mean_over="tokens")


@pytest.mark.parametrize(("mean_over", "weight"), [("tokens", 1.0), ("sequences", 0.5)])
def test_a_row_learns_from_its_response_alone(mean_over, weight):
    sample = Sample(np.array([7, 8]), np.array([-0.5, -1.5], np.float32), "ab", True, version=3)
    group = SampleGroup(Prompt("p", "x", (1, 2, 3), "ab"), (sample,), np.ones(1, np.float32), np.ones(1, bool))
    row = train_sequence(group, SampleRef(0, 0, 5, 2, advantage=2.0), mean_over)
    assert row.token_ids_T.tolist() == [1, 2, 3, 7, 8]
    assert row.loss_mask_T.tolist() == [False, False, False, True, True]
    assert row.loss_weight_T.tolist() == [0, 0, 0, weight, weight]
    assert row.advantage_T.tolist() == [0, 0, 0, 2, 2]
    assert row.engine_logp_T.tolist() == [0, 0, 0, -0.5, -1.5]
