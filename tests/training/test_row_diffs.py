"""How far the engine is from the trainer, in the tokens of a row that can be compared."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.algos.ratios import LOG_RATIO_BOUND
from megarl.config.loading import load_recipe
from megarl.training.row_diffs import RowDiffs, ShownSamples, row_diffs
from megarl.types import Prompt, Row, Sample, SampleGroup, SamplePart, TrainSequence
from tests.controller.test_loop import QUICKSTART

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


def groups(*parts: SamplePart) -> dict[int, SampleGroup]:
    """The group of which that sequence is a row: its second sample."""
    row = Row.response(
        (5, 6), np.array([7, 8, 9], np.int64), ENGINE[2:], parts or (SamplePart(4, 3),)
    )
    samples = (Sample((row,), "", finished=True),) * 2
    of_group = SampleGroup(
        Prompt("", "", (5, 6), ""), samples, np.zeros(2, np.float32), np.zeros(2, np.bool_)
    )
    return {7: of_group}


def shown(*overrides: str) -> ShownSamples:
    return ShownSamples(load_recipe(QUICKSTART, list(overrides)))


NONE_SHOWN = shown("run.sample_log_count=0")


def diff(**changes: object) -> float:
    (value,) = row_diffs([sequence(**changes)], [OLD], groups(), NONE_SHOWN).diffs.tolist()
    return value


def test_the_mean_is_over_the_sampled_tokens() -> None:
    assert diff() == pytest.approx(0.5)
    assert row_diffs([sequence()], [OLD], groups(), NONE_SHOWN).keys.tolist() == [[7, 1, 0]]


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
    rows = row_diffs(
        [sequence(loss_mask_T=nothing), sequence(key=None)], [OLD, OLD], groups(), NONE_SHOWN
    )
    assert rows.keys.shape == (0, 3) and rows.diffs.shape == (0,)
    joined = RowDiffs.joined([rows, row_diffs([sequence()], [OLD], groups(), NONE_SHOWN)])
    assert joined.keys.tolist() == [[7, 1, 0]] and len(joined.diffs) == 1


def test_sums_are_by_the_version_that_sampled() -> None:
    of_groups = groups(SamplePart(3, 1), SamplePart(4, 2))
    dropped = np.array([False, False, False, False, True])
    rows = row_diffs([sequence(dropped_T=dropped)], [OLD], of_groups, NONE_SHOWN)
    assert rows.by_version == {3: (0.5, 1), 4: (1.0, 2)}
    both = RowDiffs.joined([rows, rows, row_diffs([], [], of_groups, NONE_SHOWN)])
    assert both.by_version == {3: (1.0, 2), 4: (2.0, 4)}
    assert both.by_age(4) == {0: 0.5, 1: 0.5}


def test_the_first_tokens_of_recorded_samples_are_shown() -> None:
    keys = {"run.sample_log_count=8", "rollout.prompts_per_step=4", "run.sample_log_tokens=2"}
    rows = row_diffs([sequence()], [OLD], groups(), shown(*keys))
    assert rows.shown == {
        (7, 1, 0): {
            "token_ids": [7, 8],
            "engine_logp": [-1.0, -2.0],
            "trainer_logp": [-1.5, -2.0],
            "trained": [1, 1],
            "parts": [[4, 3]],
        }
    }
    assert not shown(*keys).has((8, 0, 0)) and not shown(*keys).has((7, 2, 0))
    assert not shown("run.sample_log_tokens=0").has((0, 0, 0))
