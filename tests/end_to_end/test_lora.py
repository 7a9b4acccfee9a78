"""Adapters in a run as a user starts it: into the engines, against the reference, and on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.end_to_end.conftest import convert
from tests.parallel.checkpoints import load, write_rewarding_adapters

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

KEYS = (
    "lora.rank=8", "train.lr=0.01", "warm_start.steps=0", "rollout.prompts_per_step=8",
    "evaluation.max_prompts=8", "reshard.verify=full", "checkpoint.every=1", "algorithm.kl_coefficient=0.1",
    "run.trackers=[]", "reward.function=parity:score", "train.updates_per_step=1",
)  # fmt: skip


PARITY = "def score(response, answer, row):\n    return float(sum(map(ord, response)) % 2)\n"


@pytest.mark.nightly
def test_a_run_with_adapters_is_merged_resumed_and_held_against_its_reference(
    launch: Callable, tmp_path: Path
) -> None:
    """TP2 PP2 EP2 into an engine of TP2, as the quickstart is; the reward is one that a new model gets at times."""
    (tmp_path / "parity.py").write_text(PARITY)
    command = launch(*KEYS, "run.steps=2")
    command.ends_well(400)
    again = launch(*KEYS, "run.steps=3", "--resume")
    assert again.finish(400) == 0, again.err
    steps = again.steps()
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["rollout/logprob_diff_mean"] < 1e-4, (
            "the engine has what the trainer computes with"
        )
        assert record["train/grad_norm"] > 0
        assert 0.99 < record["reshard/kept_share"] < 1.01, "float32 keeps nearly all of the deltas"
    assert "reshard/kept_share" not in command.records()[0], "at the start there are none"
    assert abs(steps[0]["train/reference_kl"]) < 1e-9 < steps[1]["train/reference_kl"], (
        "the adapters are off in it"
    )
    assert steps[1]["train/reference_kl"] < 10 * steps[2]["train/reference_kl"], "it went on"
    _loads_by_itself(command.folder)


def test_engines_get_the_frozen_weights_once_and_then_adapters_alone(
    launch: Callable, tmp_path: Path
) -> None:
    """PP2 into SGLang's own slots of an engine of TP2; on CPU it has these for the attention.

    A critic and a reward model compute with the same frozen weights, which all of them have in memory once.
    """
    (tmp_path / "parity.py").write_text(PARITY)
    write_rewarding_adapters(tmp_path / "models" / "tiny-qwen3-moe", tmp_path / "judge")
    lora_keys = (
        "lora.sync=adapters",
        "lora.experts=0",
        "lora.targets=[q_proj, k_proj, v_proj, o_proj]",
    )
    others = ("algorithm.name=ppo", "critic.shares_weights=true", "reward_model.adapters=judge")
    others += ("train.tp=1", "train.ep=1", "placement.gpus=2")
    command = launch(*KEYS, *lora_keys, *others, "run.steps=2", "algorithm.kl_coefficient=0.0")
    command.ends_well(400)
    start, *steps = command.records()
    for record in steps:
        assert record["rollout/logprob_diff_mean"] < 1e-4, (
            "SGLang's adapters are what the trainer computes with"
        )
        assert record["train/grad_norm"] > 0
        assert 0 < record["reshard/wire_bytes"] < start["reshard/wire_bytes"] / 15
        assert record["critic/grad_norm"] > 0 and record["time/score_s"] > 0
    assert steps[0]["critic/value_mean"] == 0.0 != steps[1]["critic/value_mean"], (
        "a new head, which learns"
    )
    assert [record["reshard/version"] for record in [start, *steps]] == [0, 1, 2]
    policy = command.folder / "runs" / "quickstart" / "checkpoints" / "step-000002"
    of_policy, of_critic = (
        sum(file.stat().st_size for file in folder.glob("*.distcp"))
        for folder in (policy, policy / "critic")
    )
    assert 0 < of_critic < 1.5 * of_policy, "adapters, a head and their optimizer"
    run = command.folder / "runs" / "quickstart"
    compared = launch("--tokens=32", verb="compare-layers", recipe=run)
    compared.ends_well(300)
    assert compared.out.startswith("all operations agree "), compared.out


@pytest.mark.nightly
def test_the_quickstart_learns_with_adapters(launch: Callable) -> None:
    """From a model whose weights are all random, and stay so: adapters learn more slowly, with longer supervision.

    The bar is that of all weights (test_run.py): five points of the held-out sums by the reward alone.
    """
    supervised = ("warm_start.steps=220", "train.updates_per_step=1")
    by_reward = ("run.steps=25", "train.lr=2.5e-4", "train.lr_schedule=constant")
    command = launch("lora.rank=8", "run.trackers=[]", *supervised, *by_reward)
    assert command.finish(900) == 0, command.err
    records = command.records()
    steps = command.steps()
    assert len(steps) == 25
    assert max(record["rollout/logprob_diff_mean"] for record in steps) < 1e-5
    worst = sorted(record["rollout/logprob_diff_max"] for record in steps)
    assert worst[-5] <= 1e-4, (
        "rounding may choose other experts for a token in a step or two, not in each"
    )
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert accuracy[0] <= 0.05, "an untrained model answers by chance"
    assert accuracy[-1] >= max(0.7, accuracy[1] + 0.05)


def _loads_by_itself(folder: Path) -> None:
    """The adapters alone, with the base by transformers, compute what the merged model does."""
    convert(folder, "runs/quickstart", "hf")
    convert(folder, "runs/quickstart", "adapters", "--adapter")
    tokens = torch.arange(20, 40)[None]
    model, _ = load(folder / "models" / "tiny-qwen3-moe")
    before, expected = model(tokens).logits, load(folder / "hf")[0](tokens).logits
    model.load_adapter(str(folder / "adapters"))
    assert (before - expected).abs().max() > 1e-3
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
