"""How far the engine is from the trainer, in the tokens of a row that can be compared."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.algos.ratios import LOG_RATIO_BOUND
from megarl.training.row_diffs import RowDiffs, row_diffs
from megarl.types import TrainSequence

ENGINE = np.array([0, 0, -1.0, -2.0, -3.0], np.float32)
OLD = np.array([0, -9.0, -1.5, -2.0, -2.0], np.float32)
MASK = np.array([False, False, True, True, True])


def sequence(**changes: object) -> TrainSequence:
    """Two tokens of a prompt, three of a response."""
    fields = {
        "token_ids_T": np.zeros(5, np.int64),
        "loss_mask_T": MASK,
        "loss_weight_T": MASK.astype(np.float32),
        "engine_logp_T": ENGINE,
        "key": (7, 1, 0),
    }
    return TrainSequence(**(fields | changes))  # type: ignore[arg-type]


def diff(**changes: object) -> float:
    (value,) = row_diffs([sequence(**changes)], [OLD]).diffs.tolist()
    return value


def test_the_mean_is_over_the_sampled_tokens() -> None:
    assert diff() == pytest.approx(0.5)
    assert row_diffs([sequence()], [OLD]).keys.tolist() == [[7, 1, 0]]


def test_tokens_that_a_correction_drops_count() -> None:
    dropped = np.array([False, False, False, False, True])
    assert diff(loss_mask_T=MASK & ~dropped, dropped_T=dropped) == pytest.approx(0.5)


def test_stale_tokens_count_where_all_are_stale() -> None:
    stale = np.array([False, False, True, True, False])
    assert diff(is_stale_T=stale) == pytest.approx(1.0)
    assert diff(is_stale_T=MASK) == pytest.approx(0.5)


def test_a_difference_is_bounded() -> None:
    engine_T = np.where(MASK, -1000.0, 0.0).astype(np.float32)
    assert diff(engine_logp_T=engine_T) == LOG_RATIO_BOUND


def test_rows_without_a_sampled_token_or_a_key_are_left_out() -> None:
    nothing = np.zeros(5, np.bool_)
    rows = row_diffs([sequence(loss_mask_T=nothing), sequence(key=None)], [OLD, OLD])
    assert rows.keys.shape == (0, 3) and rows.diffs.shape == (0,)
    joined = RowDiffs.joined([rows, row_diffs([sequence()], [OLD])])
    assert joined.keys.tolist() == [[7, 1, 0]] and len(joined.diffs) == 1
