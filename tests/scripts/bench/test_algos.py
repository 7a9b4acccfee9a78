"""The bench of advantages and losses: its loops compute what megarl does, and every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.types import Hyperparameters
from scripts.bench.algos import PER_GROUP, TOLERANCE, cases, drawn, evenly, measure, measure_groups
from scripts.bench.algos_loops import padded_gae, plain_gae, plain_loss

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "algos.py"
BATCH = drawn(64, 300, 0)
CASES = cases(BATCH)


def test_samples_are_as_described() -> None:
    assert len(BATCH.lengths) == 64 and max(BATCH.lengths) == 300 and min(BATCH.lengths) < 4
    assert BATCH.rewards.shape == (64 // PER_GROUP, PER_GROUP)
    assert BATCH.tokens.reward.count_nonzero() == BATCH.rewards.count_nonzero() > 0
    chosen = evenly(BATCH, 5)
    assert [BATCH.lengths[index] for index in chosen] == sorted(
        BATCH.lengths[index] for index in chosen
    )
    assert BATCH.lengths[chosen[-1]] == 300 and len(evenly(BATCH, 999)) == 64


@pytest.mark.parametrize("name", CASES)
def test_every_row_equals_the_loop_and_the_padded_batch(name: str) -> None:
    figures = measure(BATCH, CASES[name], loop_samples=64, padded_samples=64)
    assert figures["difference"] < TOLERANCE
    assert figures["tokens"] == sum(BATCH.lengths) and figures["ours_s"] > 0
    assert ("padded_s" in figures) == (CASES[name].padded is not None)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_equal_the_loop(name: str) -> None:
    assert measure_groups(BATCH, name)["difference"] < TOLERANCE


def test_a_difference_is_seen() -> None:
    """Or the rows above would prove nothing."""
    case = replace(
        CASES["gae"], loop=lambda samples: [plain_gae(one) + 1e-2 for one in samples], padded=None
    )
    assert measure(BATCH, case, 8, 8)["difference"] > TOLERANCE
    case = replace(
        CASES["loss: grpo"], padded=lambda many: plain_loss("cispo", many, Hyperparameters())
    )
    assert measure(BATCH, case, 8, 8)["difference"] > TOLERANCE
    case = replace(
        CASES["gae"], padded=lambda many: padded_gae(replace(many, reward=many.reward * 1.1))
    )
    assert measure(BATCH, case, 8, 8)["difference"] > TOLERANCE


@pytest.mark.slow
def test_a_run_prints_every_row() -> None:
    command = [sys.executable, SCRIPT, "--json", "--samples", "64", "--longest", "500"]
    found = json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    )
    assert found.keys() == {*CASES, *(f"advantage: {name}" for name in ("grpo", "dr_grpo", "rloo"))}
    assert all(row["difference"] < TOLERANCE and row["ratio"] > 0 for row in found.values())


@pytest.mark.slow
def test_groups_that_are_not_full_are_refused() -> None:
    found = subprocess.run(
        [sys.executable, SCRIPT, "--samples", "60"], capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 2 and "--samples 60" in found.stderr.splitlines()[-1]
