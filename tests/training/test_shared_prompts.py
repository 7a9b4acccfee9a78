"""Micro-batches in which samples share their prompt: budgets, balance, and the same updates as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.training.batching import (
    SampleRef,
    Update,
    key_of,
    plan_updates,
    refs_of,
    shuffled,
)
from megarl.training.shared_prompts import bundlings, piece_of, summed_sizes

BUDGET = 64


def _work(length: int) -> float:
    return length + length**2 / 16


def _refs(groups: list[tuple[int, list[int]]]) -> list[SampleRef]:
    """Of each group the tokens of the prompt and of the answers."""
    return [
        SampleRef(number, sample, prompt + answer, answer, num_shared=prompt)
        for number, (prompt, answers) in enumerate(groups)
        for sample, answer in enumerate(answers)
    ]


def _plan(refs: list[SampleRef], **changes: Any) -> list[Update]:
    options: dict[str, Any] = {"updates": 1, "dp": 1, "token_budget": BUDGET, "work": _work}
    options |= {"aggregation": "token_mean", "shares_prompts": True}
    return plan_updates(refs, **(options | changes))


def _slowest(update: Update, **sharing: bool) -> float:
    """The work that ranks wait for, micro-batch by micro-batch."""
    works = [
        [summed_sizes(batch, _work, **sharing) for batch in batches]
        for batches in update.micro_batches
    ]
    return float(np.array(works).max(0).sum())


def test_a_group_takes_its_prompt_once() -> None:
    (first, second) = refs = _refs([(5, [2, 3])])
    assert summed_sizes(refs, float) == 15
    assert summed_sizes(refs, float, shares_prompts=True) == 10
    other = SampleRef(1, 0, 9, 4, num_shared=5)
    whole = SampleRef(0, 2, 9, 4)  # with a prompt of its own
    assert summed_sizes([first, other, second, whole], float, shares_prompts=True) == 10 + 9 + 9
    assert summed_sizes([whole, second], _work, shares_prompts=True) == _work(9) + _work(8)


GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)),
    min_size=2,
    max_size=20,
)


@given(GROUPS, st.integers(1, 5), st.integers(1, 2), st.integers(1, 3))
def test_every_sample_lands_once_within_the_budget(
    groups: list[tuple[int, list[int]]], dp: int, updates: int, multiple: int
) -> None:
    """Updates are of the same samples, tokens and denominators as without sharing."""
    refs = shuffled(_refs(groups), seed=dp, step=multiple)
    plans = _plan(refs, dp=dp, updates=updates, multiple=multiple)
    plain = _plan(refs, dp=dp, updates=updates, multiple=multiple, shares_prompts=False)
    for update, other in zip(plans, plain, strict=True):
        landed, expected = (
            sorted(
                (ref for rank in each.micro_batches for batch in rank for ref in batch), key=key_of
            )
            for each in (update, other)
        )
        assert landed == expected
        assert (update.tokens, update.denominator) == (other.tokens, other.denominator)
        (count,) = {len(batches) for batches in update.micro_batches}
        assert count % multiple == 0 and len(update.micro_batches) == dp
        for batch in (batch for batches in update.micro_batches for batch in batches):
            assert summed_sizes(batch, float, shares_prompts=True) <= BUDGET


@given(GROUPS, st.integers(0, 3))
def test_the_plan_of_one_update_does_not_depend_on_the_order(
    groups: list[tuple[int, list[int]]], seed: int
) -> None:
    refs = _refs(groups)
    assert _plan(shuffled(refs, seed, 0), dp=2) == _plan(refs, dp=2)


@given(GROUPS)
def test_pieces_are_as_large_as_their_samples_together(groups: list[tuple[int, list[int]]]) -> None:
    """Each way has all samples once, and joins more of them than the one before it."""
    refs = _refs(groups)
    samples = [piece_of((ref,), tokens=int, work=_work, shares_prompts=True) for ref in refs]
    counts = []
    for pieces in bundlings(samples, BUDGET):
        assert sorted(key_of(ref) for piece in pieces for ref in piece.refs) == [*map(key_of, refs)]
        for piece in pieces:
            assert piece.tokens == summed_sizes(piece.refs, float, shares_prompts=True)
            work = summed_sizes(piece.refs, _work, shares_prompts=True)
            assert piece.work == pytest.approx(work)
        counts.append(max(len(piece.refs) for piece in pieces))
    assert counts == sorted({*counts})


def test_what_takes_most_of_a_row_is_placed_first() -> None:
    """Four samples of 17 tokens that share 16 of them take 20 of a row, less than one of 44: two rows have room."""
    (update,) = _plan(_refs([(16, [1] * 4)] * 2 + [(1, [43])] * 2))
    (batches,) = update.micro_batches
    taken = [summed_sizes(batch, float, shares_prompts=True) for batch in batches]
    assert taken == [BUDGET, BUDGET]


def test_long_prompts_are_computed_once_where_a_group_fits() -> None:
    (update,) = _plan(_refs([(40, [6, 5, 4, 3])] * 8), dp=4)
    batches = [batch for batches in update.micro_batches for batch in batches if batch]
    assert sorted(len({ref.group for ref in batch}) for batch in batches) == [1] * 8
    assert sorted(map(len, batches)) == [4] * 8


def test_a_group_is_divided_where_ranks_would_wait() -> None:
    """One prompt and eight ranks: its samples go to all of them, as without sharing."""
    (update,) = _plan(_refs([(4, [30] * 8)]), dp=8)
    assert [[len(batch) for batch in batches] for batches in update.micro_batches] == [[1]] * 8


@pytest.mark.parametrize(("prompt", "most"), [(24, 0.6), (2, 1.0)])
def test_ranks_wait_less_the_longer_prompts_are(prompt: int, most: float) -> None:
    rng = np.random.default_rng(0)
    refs = _refs([(prompt, rng.integers(2, 12, 8).tolist()) for _ in range(64)])
    (shared,), (plain,) = _plan(refs, dp=4), _plan(refs, dp=4, shares_prompts=False)
    assert _slowest(shared, shares_prompts=True) < most * _slowest(plain)


def test_a_sample_of_rows_that_exceeds_the_budget_is_divided_and_the_others_still_share() -> None:
    giant = [SampleRef(9, 0, 40, 30, row=row) for row in range(3)]
    refs = [*_refs([(30, [6, 5, 4, 3])] * 2), *giant]
    (update,) = _plan(refs, dp=1)
    assert sorted(map(key_of, refs_of([update]))) == sorted(map(key_of, refs))
    together = [{ref.group for ref in batch} for batch in update.micro_batches[0]]
    assert together.count({9}) == 3 and together.count({0}) == together.count({1}) == 1
