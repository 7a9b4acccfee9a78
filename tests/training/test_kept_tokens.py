"""A mismatch correction takes tokens out of an update, which is then what it would be without them.

`tests/algos/test_invariance.py` compares the losses, in every packing, with loops over samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.training import kept_tokens
from megarl.training.batching import Update
from megarl.types import Aggregation, Hyperparameters, TrainSequence

PLANNED = Update((), denominator=99.0, tokens=30, loss_tokens=99, correct_tokens=99)


def sequence(far: list[int], *, key: tuple[int, int, int], correct: bool = False) -> TrainSequence:
    """A prompt of one token, then a response token for each entry: 1 where the engine is far from a logprob of -1."""
    mask_T = np.arange(len(far) + 1) > 0
    engine_T = np.array([0.0, *(-4.0 if is_far else -1.0 for is_far in far)], np.float32)
    nll_T = mask_T.astype(np.float32) if correct else None
    weight_T = mask_T.astype(np.float32)
    return TrainSequence(
        np.zeros(len(mask_T), np.int64),
        mask_T,
        weight_T,
        engine_T,
        outcome=float(correct),
        nll_weight_T=nll_T,
        key=key,
    )


# Micro-batches of a sample of two rows, and of two samples, of which one is far from the engine as a whole.
BATCHES = [
    [
        sequence([0, 1, 0], key=(0, 0, 0), correct=True),
        sequence([1, 0], key=(0, 0, 1), correct=True),
    ],
    [sequence([1, 1], key=(0, 1, 0), correct=True), sequence([0, 0, 0, 1], key=(1, 0, 0))],
]


def divided(
    aggregation: Aggregation, **more: Any
) -> tuple[Update, list[list[TrainSequence]], list[int]]:
    hparams = Hyperparameters(
        rollout_correction="icepop", aggregation=aggregation, positive_nll=0.5, **more
    )
    old = [
        np.where(row.loss_mask_T, -1.0, 0.0).astype(np.float32)
        for batch in BATCHES
        for row in batch
    ]
    batches = kept_tokens.without_dropped(BATCHES, old, hparams)
    counts = kept_tokens.counts_of(batches).tolist()
    update = kept_tokens.divided_by_kept(PLANNED, counts, hparams, 10)
    return update, kept_tokens.reweighted(batches, update, hparams), counts


@pytest.mark.parametrize(
    ("aggregation", "denominator", "first", "last"),
    [
        ("token_mean", 6, 1, 1),
        ("sequence_mean", 2, 1 / 3, 1 / 3),
        ("sequence_sum", 2, 1, 1),
        ("constant", 20, 1, 1),
    ],
)
def test_denominators_and_weights_are_of_kept_tokens(
    aggregation: Aggregation, denominator: float, first: float, last: float
) -> None:
    """By hand: 3 tokens of the sample of two rows are kept, 3 of the last, and none of the one between them."""
    update, ((row, other), (gone, alone)), counts = divided(aggregation)
    assert counts == [6, 2, 3]
    assert (update.denominator, update.loss_tokens, update.correct_tokens, update.tokens) == (
        denominator,
        6,
        3,
        30,
    )
    np.testing.assert_allclose(row.loss_weight_T, np.array([0, 1, 0, 1]) * first, rtol=1e-6)
    np.testing.assert_allclose(other.loss_weight_T, np.array([0, 0, 1]) * first, rtol=1e-6)
    np.testing.assert_allclose(alone.loss_weight_T, np.array([0, 1, 1, 1, 0]) * last, rtol=1e-6)
    assert (
        not gone.loss_mask_T.any()
        and not gone.loss_weight_T.any()
        and gone.sampled_T.tolist() == [False, True, True]
    )
    assert row.nll_weight_T is not None and alone.nll_weight_T is None
    np.testing.assert_allclose(
        row.nll_weight_T, np.array([0, 1, 0, 1]) * 0.5 * denominator / 3, rtol=1e-6
    )


def test_an_update_of_which_nothing_is_kept_is_divided_by_one() -> None:
    update, batches, counts = divided(
        "sequence_mean", rollout_correction_low=3.0
    )  # ratios of 1 and of e^3, which is above 5
    assert counts == [0, 0, 0]
    assert (update.denominator, update.loss_tokens, update.nll_weight(0.5)) == (1.0, 1, 0.0)
    assert not any(row.loss_weight_T.any() for batch in batches for row in batch)


def test_a_rank_without_a_sample_counts_nothing() -> None:
    hparams = Hyperparameters(rollout_correction="mis_sequence")
    assert kept_tokens.without_dropped([[], []], [], hparams) == [[], []]
    assert kept_tokens.counts_of([[], []]).tolist() == [0, 0, 0]
    assert kept_tokens.reweighted([[], []], PLANNED, hparams) == [[], []]


def test_samples_are_decided_over_their_rows_together() -> None:
    """Of the first, five tokens have a product of e^6; of the last, four have e^3: the bound is e^4."""
    hparams = Hyperparameters(
        rollout_correction="mis_sequence", rollout_correction_high=float(np.exp(4))
    )
    old = [
        np.where(row.loss_mask_T, -1.0, 0.0).astype(np.float32)
        for batch in BATCHES
        for row in batch
    ]
    batches = kept_tokens.without_dropped(BATCHES, old, hparams)
    assert [[bool(row.loss_mask_T.any()) for row in batch] for batch in batches] == [
        [False, False],
        [False, True],
    ]
