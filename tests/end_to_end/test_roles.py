"""A critic and a reward model, each on a GPU slot of its own, in a run as a user starts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.prompts import PromptSource, load_prompts
from megarl.model.tokenizer import chat_ids, load_tokenizer
from tests.parallel.checkpoints import write_classifier

pytestmark = pytest.mark.slow

KEYS = (
    "algorithm.name=ppo", "critic.ranks.first_gpu=1", "reward_model.path=classifier", "reward_model.weight=0.5",
    "reward_model.ranks.first_gpu=2", "reward.function=nothing:score", "placement.gpus=3", "placement.train_gpus=1",
    "train.tp=1", "train.pp=1", "train.ep=1", "rollout.engine.tp=1", "rollout.prompts_per_step=4", "run.steps=2",
    "warm_start.steps=0", "evaluation.max_prompts=4", "evaluation.samples=3", "evaluation.temperature=1.0",
    "run.trackers=[]", "algorithm.kl_coefficient=0.1", "train.lr=0.01", "rollout.temperature=1.3",
    "rollout.samples_per_prompt=1", "train.updates_per_step=1",
)  # fmt: skip


@pytest.mark.nightly  # by day test_lora.py has a run with both
def test_a_run_with_a_critic_and_a_reward_model(launch: Callable, tmp_path: Path) -> None:
    """Unverified on a GPU.

    cluster/ray_session.py: a quarter of a GPU each for trainer, engine, critic and reward model in one bundle,
    every GPU visible to every process. To check first: each process is on the GPU of its slot.
    """
    model = write_classifier(
        (tmp_path / "models" / "tiny-qwen3-moe").resolve(), tmp_path / "classifier"
    )
    (tmp_path / "nothing.py").write_text("def score(response, answer, row):\n    return 0.0\n")
    command = launch(*KEYS)
    command.ends_well(200)
    steps = command.steps()
    for record in steps:
        assert {
            "time/score_s",
            "time/critic_s",
            "critic/loss",
            "critic/explained_variance",
        } <= record.keys()
        assert record["rollout/logprob_diff_mean"] < 1e-6
        assert record["rollout/samples"] == 4
        assert record["critic/return_mean"] != record["critic/value_mean"]
        assert "time/logprobs_s" in record, (
            "the policy says what its tokens pay before the critic learns"
        )
    assert abs(steps[0]["train/reference_kl"]) < 1e-9 < steps[1]["train/reference_kl"]
    assert {"eval/arith/avg@3", "eval/arith/pass@3", "eval/arith/maj@3"} <= command.records()[
        0
    ].keys()
    assert steps[0]["critic/value_mean"] == 0.0, "a new head"
    assert steps[1]["critic/value_mean"] != 0.0

    tokenizer: Any = load_tokenizer(str(tmp_path / "classifier"))
    source = PromptSource("data.train", str(tmp_path / "data" / "train.jsonl"))
    prompts = load_prompts(source, tokenizer, max_prompt_tokens=64).prompts
    asked = {prompt.text: prompt.row["prompt"] for prompt in prompts}
    lines = (tmp_path / "runs" / "quickstart" / "samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        row = chat_ids(tokenizer, asked[sample["prompt"]], sample["response"])
        with torch.no_grad():
            score = float(model(torch.tensor([row])).logits[0, 0])
        assert sample["reward"] == pytest.approx(0.5 * score, abs=1e-4)
    assert lines
