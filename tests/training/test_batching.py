"""Batches: every sample once, budgets kept, ranks balanced, and the rows that come out of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.training.batching import (
    SampleRef,
    Update,
    key_of,
    own_samples,
    plan_updates,
    refs_of,
    shuffled,
)
from megarl.training.train_sequences import train_sequences
from megarl.types import Prompt, SampleGroup
from tests.samples.responses import response

BUDGET = 64


def _work(length: int) -> float:
    return length + length**2 / 16


def _refs(lengths: list[int]) -> list[SampleRef]:
    return [
        SampleRef(group=i // 4, sample=i % 4, length=n, response_length=n - 1)
        for i, n in enumerate(lengths)
    ]


def _plan(samples: list[SampleRef], **changes: Any) -> list[Update]:
    options: dict[str, Any] = {"updates": 1, "dp": 1, "token_budget": BUDGET, "work": _work}
    options["aggregation"] = "token_mean"
    return plan_updates(samples, **(options | changes))


def _works(update: Update) -> np.ndarray:
    """[dp, micro-batches]"""
    return np.array(
        [
            [sum(_work(ref.length) for ref in batch) for batch in rank]
            for rank in update.micro_batches
        ]
    )


def _lognormal(count: int) -> list[int]:
    return [int(n) + 2 for n in np.minimum(np.random.default_rng(0).lognormal(6, 1, count), 8000)]


@settings(max_examples=200)
@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=80),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 3),
)
def test_every_sample_lands_once_within_the_budget(lengths, dp, updates, align, multiple):
    samples = _refs(lengths)
    plans = _plan(samples, updates=updates, dp=dp, align=align, multiple=multiple)
    landed = [
        ref for plan in plans for rank in plan.micro_batches for batch in rank for ref in batch
    ]
    assert sorted(landed, key=lambda r: (r.group, r.sample)) == samples
    for plan in plans:
        assert len(plan.micro_batches) == dp
        # expert all-to-all needs equal counts
        (count,) = {len(rank) for rank in plan.micro_batches}
        assert count % multiple == 0
        batches = [batch for rank in plan.micro_batches for batch in rank]
        taken = [sum(-(-ref.length // align) * align for ref in batch) for batch in batches]
        assert max(taken) <= BUDGET
        # Any two of best fit's bins together hold more than a budget, so at most twice the fewest; then rounding up.
        # Two rounds more may be faster.
        assert count * dp < 2 * sum(taken) / BUDGET + 1 + 3 * dp * multiple
        refs = [ref for batch in batches for ref in batch]
        assert plan.denominator == plan.loss_tokens == sum(ref.response_length for ref in refs)
        assert plan.tokens == sum(ref.length for ref in refs)


_SINGLE_ROW = st.integers(2, 4 * BUDGET - 8).map(lambda length: [length])
_SHORT_ROWS = st.lists(st.integers(2, 9), min_size=1, max_size=12)
# of up to 4 rows, which one micro-batch may not hold together
_LONG_ROWS = st.lists(st.integers(2, 4 * BUDGET - 8), min_size=1, max_size=4)


@settings(max_examples=300)
@given(
    st.one_of(
        st.lists(_SINGLE_ROW | _SHORT_ROWS, min_size=2, max_size=40),
        st.lists(_LONG_ROWS | _SHORT_ROWS, min_size=2, max_size=20),
    ),
    st.sampled_from([4, 8, 12]),
    st.integers(1, 2),
    st.integers(1, 3),
)
# seven rows of 3 tokens need 56, and so two ranks of 40; a row of 24 tokens is longer, and one rank holds it
@example([[60], [24], [3] * 7], 4, 1, 1)
def test_long_sequences_are_split_over_ranks(rows_of_samples, dp, updates, multiple):
    """Each lands once; the ranks of a row follow each other, and its budgets hold it."""
    max_cp, align = 4, 8
    samples = [
        SampleRef(group=0, sample=number, row=row, length=n, response_length=n - 1)
        for number, lengths in enumerate(rows_of_samples)
        for row, n in enumerate(lengths)
    ]
    changes = {"dp": dp, "multiple": multiple, "align": align, "max_cp": max_cp}
    landed: list[SampleRef] = []
    for plan in _plan(samples, updates=updates, **changes):
        (count,) = {len(rank) for rank in plan.micro_batches}
        assert count % multiple == 0
        for place in range(count):
            at_place = [rank[place] for rank in plan.micro_batches]
            rank = 0
            while rank < dp:
                batch = at_place[rank]
                (size,) = {ref.cp for ref in batch} or {1}
                assert size in (1, 2, 4) and rank % size == 0
                assert at_place[rank : rank + size] == [batch] * size
                assert sum(-(-ref.length // align) * align for ref in batch) <= size * BUDGET
                landed += batch
                rank += size
        ranks_of_sample: dict[int, set[int]] = {}
        for rank, batches in enumerate(plan.micro_batches):
            for sample in {ref.sample for batch in batches for ref in batch}:
                ranks_of_sample.setdefault(sample, set()).add(rank)
        for sample, ranks in ranks_of_sample.items():
            rows_of_sample = {ref.row for ref in samples if ref.sample == sample}
            for rank in ranks:
                refs = [ref for batch in plan.micro_batches[rank] for ref in batch]
                assert {ref.row for ref in refs if ref.sample == sample} == rows_of_sample
    assert [replace(ref, cp=1) for ref in sorted(landed, key=key_of)] == samples


def test_no_row_is_split_that_one_rank_holds():
    """A long sample takes ranks, and short ones fill them up and all others."""
    (plan,) = _plan(_refs([100, 30, *[16] * 12]), dp=4, max_cp=4, align=1)
    assert [len(rank) for rank in plan.micro_batches] == [2] * 4
    split = {ref.length: ref.cp for rank in plan.micro_batches for ref in rank[0]}
    assert split[100] == 2 and split[30] == 1


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_split_long_rows_wait_little_for_each_other(seed):
    """The work of a row is shared by its ranks, and they are as busy as those that have short ones."""
    lengths = [int(n) for n in np.random.default_rng(seed).lognormal(8.7, 0.7, 2048).clip(2, 22000)]
    cost = lambda n: n + n**2 / 40000  # noqa: E731
    (plan,) = _plan(_refs(lengths), dp=16, token_budget=8192, work=cost, max_cp=4, align=8)
    works = np.array(
        [
            [sum(cost(ref.length) / ref.cp for ref in batch) for batch in rank]
            for rank in plan.micro_batches
        ]
    )
    assert works.sum() == pytest.approx(sum(map(cost, lengths)))
    assert works.max(0).sum() < 1.1 * works.sum() / 16


@settings(max_examples=50)
@given(st.permutations(range(40)), st.integers(1, 5))
def test_order_of_arrival_does_not_change_the_shares(order, dp):
    samples = _refs([2 + i * 7 % 60 for i in range(40)])
    shuffled = [samples[i] for i in order]
    assert _plan(samples, dp=dp, aggregation="sequence_mean") == _plan(
        shuffled, dp=dp, aggregation="sequence_mean"
    )


def test_denominators_do_not_depend_on_the_number_of_ranks():
    samples = _refs([5, 9, 30, 2, 7, 12, 8, 21])
    expected = {"token_mean": 86, "sequence_mean": 8, "sequence_sum": 8, "constant": 8 * 20}
    for aggregation, denominator in expected.items():
        change = {"aggregation": aggregation, "longest_response": 20}
        denominators = {_plan(samples, dp=dp, **change)[0].denominator for dp in (1, 2, 3, 8, 11)}
        assert denominators == {denominator}


@pytest.mark.parametrize("dp", [3, 16, 50])
def test_ranks_and_steps_are_alike_in_work(dp):
    lengths = _lognormal(2048)
    works = _works(_plan(_refs(lengths), dp=dp, token_budget=16000)[0])
    least = max(works.sum() / dp, *map(_work, lengths))
    assert works.sum(1).max() / least < 1.1
    assert works.max(0).sum() / least < 1.1, "ranks wait for each other in every micro-batch"


def test_one_giant_is_joined_by_heavy_micro_batches():
    """Where a sample is more work than a rank's mean, waiting for it alone is what the plan costs."""
    giant, many = 60, [4] * 200
    works = _works(_plan(_refs([giant, *many]), dp=8, token_budget=BUDGET)[0])
    assert works.shape[1] == 2
    assert works.max(0).sum() < 1.25 * max(_work(giant), works.sum() / 8)


def test_a_pipeline_takes_more_micro_batches_than_the_budget_asks_for():
    """They keep its stages busy, until what each costs in itself outweighs that."""
    samples = _refs([2048] * 32)
    for stages, multiple, count in ((0, 1, 4), (0.1, 1, 4), (7, 1, 6), (7, 8, 24)):
        options = {
            "token_budget": 16384,
            "work": float,
            "multiple": multiple,
            "bubble_micro_batches": stages,
        }
        assert len(_plan(samples, **options)[0].micro_batches[0]) == count


@pytest.mark.parametrize(("seed", "dp"), [(0, 64), (1, 64), (2, 64), (0, 512)])
def test_ranks_wait_hardly_longer_than_the_longest_sample_makes_them(seed, dp):
    """While it is computed the other ranks have at most the longest samples for which all budgets have room."""
    budget = 32768
    lengths = np.sort(
        np.random.default_rng(seed).lognormal(7.5, 0.8, 8192).clip(2, budget).astype(int)
    )[::-1]
    work = [length + length**2 / 40000 for length in lengths.tolist()]  # as of Qwen3-30B-A3B
    beside = sum(work[: 1 + int(np.searchsorted(np.cumsum(lengths), dp * budget))])
    least = max(sum(work) / dp, work[0] + (sum(work) - beside) / dp)
    (plan,) = _plan(
        _refs(lengths.tolist()), dp=dp, token_budget=budget, work=lambda n: n + n**2 / 40000
    )
    by_place = [
        [sum(n.length + n.length**2 / 40000 for n in batch) for batch in rank]
        for rank in plan.micro_batches
    ]
    assert np.array(by_place).max(0).sum() < 1.015 * least


def test_planning_time_grows_with_samples_times_micro_batches():
    """Four times as many on four times as many ranks: 16 times the work, and no more than twice that."""
    spent = []
    for size in (1, 4):
        samples, times = _refs(_lognormal(2048 * size)), []
        for _ in range(8 // size):  # the least of them: other work on the machine takes caches away
            started = time.process_time()
            _plan(samples, dp=128 * size, token_budget=8192)
            times.append(time.process_time() - started)
        spent.append(min(times))
    assert spent[1] < 32 * spent[0]


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ([2], {"updates": 2}, "1 samples cannot make 2 updates"),
        ([2, 65], {}, "sample of 65 tokens exceeds .* 64"),
        ([2, 63], {"align": 10}, "sample of 70 tokens exceeds .* 64"),
    ],
)
def test_impossible_batches_say_why(lengths, changes, message):
    with pytest.raises(ValueError, match=message):
        _plan(_refs(lengths), **changes)


def test_correct_samples_weigh_together_what_the_recipe_says():
    """Of 4 + 2 correct tokens and a denominator of 9: 0.1 of their mean is 0.1 x 9 / 6 of each."""
    refs = [SampleRef(0, i, 2 + n, n, is_correct=n % 2 == 0) for i, n in enumerate((4, 3, 2))]
    (update,) = plan_updates(
        refs, updates=1, dp=2, token_budget=99, aggregation="token_mean", work=float
    )
    assert (update.denominator, update.correct_tokens) == (9, 6)
    assert update.nll_weight(0.1) == pytest.approx(0.15)
    (none,) = plan_updates(
        refs[1:2], updates=1, dp=1, token_budget=99, aggregation="token_mean", work=float
    )
    assert none.nll_weight(0.1) == 0.0


def test_a_share_needs_no_more_than_its_own_samples():
    """What a rank makes of its updates is the same, and what others train on did not come."""
    prompt = Prompt("0", "2+3=", (1, 2), "5")

    def group(lengths: list[int]) -> SampleGroup:
        samples = tuple(
            response((1, 2), np.arange(n), np.full(n, -0.5, np.float32), "x" * n) for n in lengths
        )
        return SampleGroup(
            prompt, samples, np.ones(len(lengths), np.float32), np.ones(len(lengths), np.bool_)
        )

    groups = {3: group([4, 5, 6]), 7: group([7, 8])}
    named = [(3, 2), (7, 0), (3, 0)]
    refs = [
        SampleRef(at, which, 2 + groups[at].samples[which].num_trained, 4) for at, which in named
    ]
    updates = [Update(((tuple(refs[:2]),),), 1.0, 1, 1), Update(((tuple(refs[2:]),),), 1.0, 1, 1)]
    rank_groups = own_samples(updates, [3, 7], *groups.values())
    kept = [*rank_groups.values()]
    assert [*rank_groups] == [3, 7]
    assert [[sample.num_trained for sample in group.samples] for group in kept] == [
        [4, 0, 6],
        [7, 0],
    ]
    assert "".join(sample.text for sample in kept[0].samples) == "x" * 10
    for update in updates:
        (batch,) = update.micro_batches[0]
        before = train_sequences((batch,), groups, "token_mean")
        after = train_sequences((batch,), rank_groups, "token_mean")
        for sequence, other in zip(before[0], after[0], strict=True):
            np.testing.assert_array_equal(sequence.token_ids_T, other.token_ids_T)
            np.testing.assert_array_equal(sequence.engine_logp_T, other.engine_logp_T)


def _samples_of_rows(rows: list[int]) -> list[SampleRef]:
    """Samples with so many rows each."""
    return [
        SampleRef(
            number // 4,
            number % 4,
            length=2 + number % 30,
            response_length=1 + number % 30,
            row=row,
        )
        for number, count in enumerate(rows)
        for row in range(count)
    ]


@given(
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=40), updates=st.integers(1, 7), seed=st.integers(0, 9),
    step=st.integers(1, 9),
)  # fmt: skip
def test_shuffled_samples_are_whole_and_the_same_for_a_step(
    rows: list[int], updates: int, seed: int, step: int
) -> None:
    """All rows of a sample stay in one update, updates differ by one sample at most, and one update is as ever."""
    refs = _samples_of_rows(rows)
    reordered = shuffled(refs, seed, step)
    assert reordered == shuffled(refs, seed, step)
    assert sorted(reordered, key=key_of) == refs
    updates = min(updates, len(rows))
    plans = _plan(reordered, updates=updates)
    in_update = [{key_of(ref)[:2] for ref in refs_of([plan])} for plan in plans]
    assert sum(map(len, in_update)) == len(rows) == len(set.union(*in_update))
    assert max(map(len, in_update)) - min(map(len, in_update)) <= 1
    assert sorted((ref for plan in plans for ref in refs_of([plan])), key=key_of) == refs
    assert _plan(reordered) == _plan(refs), "of one update"


def test_each_run_and_each_step_has_an_order_of_its_own() -> None:
    refs = _samples_of_rows([1] * 20)
    orders = [tuple(shuffled(refs, seed, step)) for seed in range(4) for step in range(1, 5)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("count", [96, 100])
def test_updates_are_alike_in_tokens_and_a_sample_is_in_any(count: int) -> None:
    """Sorted by length, as a buffer is by age; also where the numbers do not divide."""
    refs = _refs(sorted(_lognormal(count), reverse=True))
    steps = [_plan(shuffled(refs, 1, step), updates=8, token_budget=10**5) for step in range(200)]
    tokens = np.array([[plan.loss_tokens for plan in plans] for plans in steps])
    assert tokens.std(1).mean() / tokens.mean() < 0.1, "at random it is 0.25"
    places = np.array(
        [[key_of(refs[0]) in map(key_of, refs_of([plan])) for plan in plans] for plans in steps]
    ).sum(0)
    assert places.min() > 200 / 8 / 3, "the longest sample is in each update about as often"
