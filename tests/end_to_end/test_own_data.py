"""docs/data.md, "Your own data and reward in ten minutes": its files are written, and its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {"python": [sys.executable], "megarl": [sys.executable, "-m", "megarl.cli"]}
STEPS = 2  # of the ten of the page


def run_as_shown(command: str, folder: Path) -> str:
    """What a command of the page prints; a training run has fewer steps."""
    program, *arguments = shlex.split(command)
    if arguments[0] == "train" and "--dry-run" not in arguments:
        arguments.append(f"run.steps={STEPS}")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_ten_minutes_are_walked(tiny_model: Path, tmp_path: Path) -> None:
    """The reward separates answers as the page shows, and the model learns from it what the warm start left."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-qwen3-moe").symlink_to(tiny_model)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data").mkdir()
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("\n## Columns\n")[0]
    fences = FENCE.findall(page)
    for language, block in fences:
        if language:
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    commands = [
        line
        for language, block in fences
        for line in block.splitlines()
        if not language and line.startswith(("python ", "megarl "))
    ]
    printed = {command: run_as_shown(command, tmp_path) for command in commands}

    (verdicts,) = (block for _, block in fences if block.startswith("response  "))
    assert any(verdicts in output for output in printed.values()), "the reward, tried"
    records = [
        json.loads(line)
        for line in (tmp_path / "runs/reverse/metrics.jsonl").read_text().splitlines()
    ]
    untrained, warm, last = (
        record["eval/accuracy"] for record in records if "eval/accuracy" in record
    )
    assert untrained < 0.05 and last > warm + 0.1
    rewards = [record["reward/mean"] for record in records if record["step"] > 0]
    assert len(rewards) == STEPS and rewards[-1] > rewards[0]
    samples = (tmp_path / "runs/reverse/samples.jsonl").read_text()
    assert "<user>reverse " in samples
    assert (tmp_path / "runs/reverse/report.html").stat().st_size > 1_000_000
    shown = [line.split("  ")[0] for line in page.splitlines() if line.startswith("step ")]
    assert shown == ["step 1/10", "step 5/10", "step 10/10"], "of the recipe's ten steps"
