"""The bench of advantages and losses: its loops compute what megarl does, and every figure is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.types import Hyperparameters
from scripts.bench.algos import PER_GROUP, TOLERANCE, cases, drawn, evenly, measure, measure_groups
from scripts.bench.algos_loops import padded_gae, plain_gae, plain_loss
from tests.scripts.bench.benches import figures, refusal

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
    row = measure(BATCH, CASES[name], loop_samples=64, padded_samples=64)
    assert row["difference"] < TOLERANCE
    assert row["tokens"] == sum(BATCH.lengths) and row["ours_s"] > 0
    assert ("padded_s" in row) == (CASES[name].padded is not None)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_equal_the_loop(name: str) -> None:
    assert measure_groups(BATCH, name)["difference"] < TOLERANCE


def test_a_difference_is_seen() -> None:
    """Or the rows above would prove nothing."""
    gae, grpo = CASES["gae"], CASES["loss: grpo"]
    wrong = [
        replace(
            gae, loop=lambda samples: [plain_gae(sample) + 1e-2 for sample in samples], padded=None
        ),
        replace(grpo, padded=lambda many: plain_loss("cispo", many, Hyperparameters())),
        replace(gae, padded=lambda many: padded_gae(replace(many, reward=many.reward * 1.1))),
    ]
    for case in wrong:
        assert measure(BATCH, case, 8, 8)["difference"] > TOLERANCE


@pytest.mark.slow
def test_a_run_prints_every_row() -> None:
    rows = figures("algos", "--samples 64 --longest 500")
    assert rows.keys() == {*CASES, *(f"advantage: {name}" for name in ("grpo", "dr_grpo", "rloo"))}
    assert all(row["difference"] < TOLERANCE and row["ratio"] > 0 for row in rows.values())


@pytest.mark.slow
def test_groups_that_are_not_full_are_refused() -> None:
    assert "--samples 60" in refusal("algos", "--samples 60")
