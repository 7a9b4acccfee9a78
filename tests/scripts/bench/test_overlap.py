"""The bench of rollouts in phases: its arms on simulated engines, by hand; docs/bench/overlap.md has the real ones."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from scripts.bench import overlap
from scripts.bench.overlap import Fit, Planted

LONGEST, PHASE = 16, 4


def predicted(planted: Planted, length: int, count: int = 12) -> dict[str, list[Any]]:
    """The steps of each arm; every decode step takes a second, and every response `length` of them."""
    arms = overlap.arms_of(LONGEST, PHASE, 2.0)
    return overlap.predicted_steps(
        arms, Fit(1.0, 0.0, 0.0), lambda prompt_index: np.full(4, length), planted, count
    )


def test_whole_steps_of_equal_responses_by_hand() -> None:
    """Two steps' prompts are in flight: of two steps one has the four phases of all of them, and the other none.

    A verdict comes 2 s after its response, and a phase lasts until then. Ahead, the first of the four phases is
    sampled beside the training of the step that has none.
    """
    planted = Planted(train_s=7.0, reward_s=2.0)
    steps = predicted(planted, LONGEST)
    rows = {
        name: overlap.figures(run_steps[4:], planted.train_s) for name, run_steps in steps.items()
    }
    assert (rows["sync"]["seconds"], rows["sync"]["waits"]) == (16 + 2 + 7, 18)
    assert [rows[name]["phases"] for name in steps] == [1, 2, 2]
    assert rows["phases"]["seconds"] == (3 * 4 + 4 + 2) / 2 + 7
    assert rows["ahead"]["seconds"] == (2 * 4 + 4 + 2) / 2 + 7, (
        "the phase beside training is shorter than it"
    )
    assert (
        rows["sync"]["stale_max"],
        rows["phases"]["stale_max"],
        rows["ahead"]["stale_max"],
    ) == (0, 1, 2)
    assert rows["phases"]["read_again"] == rows["ahead"]["read_again"] == (4 + 8 + 12) / 16


def test_training_that_is_shorter_than_the_phase_beside_it_costs_nothing() -> None:
    """Responses of one phase: a step of two has one beside its training, with verdicts 6 s after its last tokens."""
    planted = Planted(train_s=3.0, reward_s=6.0)
    predictions = {
        name: overlap.figures(run_steps[4:], 3.0)
        for name, run_steps in predicted(planted, PHASE).items()
    }
    assert predictions["phases"]["seconds"] == 3 + (4 + 6) / 2
    assert predictions["ahead"]["seconds"] == ((4 + 6) + 3) / 2
    rows = overlap.with_ratios(predictions, predictions)
    assert rows["ahead"]["ratio"] == rows["ahead"]["predicted_ratio"] == (4 + 6 + 3) / 6.5


def test_a_phase_waits_for_the_reward_results_on_what_it_ends_alone() -> None:
    ends = [(1.0, overlap.SimulatedRequest(12, 2)), (5.0, overlap.SimulatedRequest(12, 4))]
    assert overlap.with_rewards_s(ends, {(12, 2)}, 3.0) == 5.0
    assert overlap.with_rewards_s(ends, {(12, 2)}, 6.0) == 7.0
    assert overlap.with_rewards_s(ends, {(12, 4)}, 6.0) == 11.0


def test_more_prompts_in_flight_and_shorter_phases_gain_more() -> None:
    lengths_of = overlap.planted_lengths(1024, 0.25, 1.0, seed=0)
    whole, few, more, most = (
        overlap.table_s(lengths_of, 4, *size) for size in ((1, 1), (1.5, 4), (2, 4), (3, 8))
    )
    assert whole > few > more > most > whole / 4


def test_the_table_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--table", "--json"])
    monkeypatch.setattr(
        overlap, "table_s", lambda lengths_of, samples, times, phases: 6.0 / (times + phases)
    )
    overlap.main()
    tables = json.loads(capsys.readouterr().out)
    assert [len(row) for row in tables.values()] == [12] * 4
    assert tables["sigma 1, mean 0.25, 4 samples"]["1.5x, 8"] == 9.5 / 2
