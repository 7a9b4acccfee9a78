"""A run whose engine is wrong ends with a line that names it; until then nothing is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.faulty_engine import ERROR, WRONG_FROM

pytestmark = pytest.mark.slow

TWO_ENGINES = (
    "run.steps=30", "run.trackers=[]", "warm_start.steps=0", "evaluation.every=1000", "evaluation.at_start=false",
    "rollout.prompts_per_step=24", "rollout.samples_per_prompt=4", "placement.gpus=2",
    "train.tp=1", "train.pp=1", "train.ep=2", "rollout.engine={count: 2, tp: 1}",
)  # fmt: skip
LARGEST = "rollout/logprob_diff_engine_max"


def test_an_engine_with_wrong_logprobs_is_named(launch: Callable) -> None:
    command = launch(*TWO_ENGINES, module="tests.end_to_end.faulty_engine")
    assert command.finish(300) == 1, command.err
    line = command.err.strip().splitlines()[-1]
    healthy = [record[LARGEST] for record in command.steps() if record[LARGEST] < ERROR / 10]
    wrong = command.steps()[len(healthy) :]
    assert len(healthy) >= WRONG_FROM - 1
    assert len(wrong) <= 6, "so many steps of this size are enough"
    assert f"step {len(healthy) + len(wrong) + 1}: engine 1 (GPU 1 of " in line
    assert "gave log-probabilities that differ from the trainer's by 0.01 a token" in line
    assert "Traceback" not in command.err
    assert command.leftovers() == []
