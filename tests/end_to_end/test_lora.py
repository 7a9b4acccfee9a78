"""Adapters in a run as a user starts it: into the engines, against the reference, and on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KEYS = (
    "lora.rank=8", "lora.experts=2", "train.lr=0.01", "warm_start.steps=0", "rollout.prompts_per_step=8",
    "evaluation.max_prompts=8", "reshard.verify=full", "checkpoint.every=1", "algorithm.kl_coefficient=0.1",
    "run.trackers=[]", "reward.function=parity:score",
)  # fmt: skip


@pytest.mark.nightly
def test_a_run_with_adapters_is_merged_resumed_and_held_against_its_reference(
    launch: Callable, tmp_path: Path
) -> None:
    """TP2 PP2 EP2 into an engine of TP2, as the quickstart is; the reward is one that a new model gets at times."""
    score = "def score(response, answer, row):\n    return float(sum(map(ord, response)) % 2)\n"
    (tmp_path / "parity.py").write_text(score)
    command = launch(*KEYS, "run.steps=2")
    assert command.finish(400) == 0, command.err
    assert command.leftovers() == []
    again = launch(*KEYS, "run.steps=3", "--resume")
    assert again.finish(400) == 0, again.err
    steps = [record for record in again.records() if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["rollout/logprob_gap_mean"] < 1e-4, "the engine has what the trainer computes with"
        assert record["train/grad_norm"] > 0
    assert abs(steps[0]["train/reference_kl"]) < 1e-9 < steps[1]["train/reference_kl"], "the adapters are off in it"
    assert steps[1]["train/reference_kl"] < 10 * steps[2]["train/reference_kl"], "it went on"
