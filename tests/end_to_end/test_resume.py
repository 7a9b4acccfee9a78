"""A run that is killed again and again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import convert
from tests.parallel.checkpoints import load

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("points", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_ends_leave_no_trace(tmp_path: Path, points: int) -> None:
    """SIGKILL while everything starts, in rollouts, updates, saves and reshards, `megarl drain` between two
    checkpoints, a second engine that joins and leaves: to the last bit the same end. By night SIGUSR1, engines on the
    GPUs of the training ranks, and also the end of a run on two engines with slow rewards."""
    _soak(tmp_path, points, *(["--spread"] if points > 2 else ["--drain", "--elastic"]))
    _check_converted(tmp_path)
    log = (tmp_path / "disturbed.log").read_text()
    assert "this run goes on after step" in log


@pytest.mark.nightly
@pytest.mark.parametrize("engines", ["--spread", "--elastic"])
def test_ends_of_a_run_that_samples_ahead_leave_no_trace(tmp_path: Path, engines: str) -> None:
    """Engines sample while the ranks learn, and the end is the same with two of them, of which one shares a slot, and
    with a second one that joins and leaves."""
    steps = _soak(tmp_path, 4, engines, "--ahead")
    for record in steps:
        learning_s = record["time/critic_s"] + record.get("time/train_s", 0.0)
        assert record["rollout/waited_s"] < learning_s, (
            "engines sampled before the updates were done"
        )
    ages = [record["stale/token_max"] for record in steps]
    assert ages[0] == 0 and min(ages[1:]) >= 1, (
        "a part of every step is sampled before the weights are published"
    )


@pytest.mark.nightly
def test_ends_of_a_run_with_episodes_leave_no_trace(tmp_path: Path) -> None:
    """Of several turns with an environment, which phases leave open, and another process goes on with."""
    steps = _soak(tmp_path, 3, "--episodes", "--spread")
    assert max(record["stale/token_max"] for record in steps) >= 1
    assert all(
        record["episode/turns_mean"] > 1 and record["episode/begun_anew"] == 0 for record in steps
    )
    assert not any(record.get("episode/prefix_hit_share") for record in steps), (
        "seeded engines have no such cache"
    )
    for turn in (1, 2):  # a step whose tokens of a turn are all of older weights has none
        diffs = [
            diff
            for record in steps
            if (diff := record.get(f"rollout/logprob_diff_turn_{turn}")) is not None
        ]
        assert diffs and max(diffs) < 1e-4


@pytest.mark.nightly
def test_ends_of_a_run_with_adapters_leave_no_trace(tmp_path: Path) -> None:
    """Merged into bfloat16 weights, which each version rounds by chance: a resumed run rounds them as before."""
    steps = _soak(tmp_path, 6, "--lora", "--spread")
    assert all(record["train/grad_norm"] > 0 for record in steps[2:]), (
        "after the critic's warm-up the adapters learn"
    )
    assert all(record["reshard/kept_share"] != 1.0 for record in steps), "the sums are rounded"


def _soak(folder: Path, points: int, *options: str) -> list[dict[str, Any]]:
    """End a run at so many points; the records of the steps of the undisturbed one."""
    script = ROOT / "scripts" / "soak_resume.py"
    command = [sys.executable, script, "--points", str(points), "--seed", "1", "--json"]
    done = subprocess.run([*command, *options, "--folder", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["ends"]) == points
    (asked,) = [end for end in report["ends"] if not end.startswith("killed")]
    is_saved = re.fullmatch(r"asked after 2 steps, ended with a checkpoint of step \d+", asked)
    assert is_saved, report["ends"]
    assert report["differences"] == []
    lines = (folder / "runs" / "undisturbed" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["step"] > 0]


def _check_converted(folder: Path) -> None:
    """The run's last weights as a model that transformers loads whole, by training ranks in another layout."""
    layout = ("train.ep=1", "placement.gpus=1", "placement.train_gpus=1")
    convert(folder, "runs/disturbed", "hf", *layout)
    model, report = load(folder / "hf")
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    begun, _ = load(folder / "models" / "tiny-qwen3-moe")
    assert not torch.equal(model.lm_head.weight, begun.lm_head.weight)
    _try_the_readme(folder)


def _try_the_readme(folder: Path) -> None:
    """The example of docs/running.md in a process without megarl: transformers loads the model and generates."""
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/running.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert program.count('"OUT"') == 2
    command = [sys.executable, "-c", program.replace('"OUT"', '"hf"')]
    settings = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"123\+4=.{0,5}", done.stdout.strip("\n"), re.DOTALL), done.stdout
