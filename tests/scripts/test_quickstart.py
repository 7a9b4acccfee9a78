"""The quickstart's script: what it runs with which keys, how it ends, and the lines that compare its two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_scripts import ROOT, Sandbox

TOOLS = "megarl train recipes/quickstart_tools.yaml"
WITHOUT = "episode=null data.messages=null run.name=quickstart-without-tool"
# A stand-in for megarl ends so; the second run of the tools is known by its keys.
FIRST_ENDS = '[[ "$*" == *episode=null* ]] || exit {}'
SECOND_ENDS = '[[ "$*" != *episode=null* ]] || exit {}'


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def start(sandbox: Sandbox, *arguments: str, megarl: str = "exit 0") -> tuple[int, list[str]]:
    """The exit code of the script, and what it ran after the set-up."""
    sandbox.stand_in("megarl", megarl)
    command = ["bash", sandbox.repo / "scripts" / "quickstart.sh", *arguments]
    done = subprocess.run(command, env={"PATH": str(sandbox.bin)}, capture_output=True, text=True)
    ran = [line.replace("BIN/", "").replace("REPO/.venv/bin/", "") for line in sandbox.commands()]
    return done.returncode, [line for line in ran if line.startswith(("megarl ", "python scripts/"))]


def test_the_quickstart_is_one_run_whose_end_is_its_own(sandbox: Sandbox) -> None:
    code, ran = start(sandbox, "run.steps=2", "--resume", megarl="exit 75")
    assert (code, ran) == (75, [
        "python scripts/make_tiny_moe.py --out models/tiny-qwen3-moe",
        "python scripts/make_arithmetic.py --out data",
        "megarl train recipes/quickstart.yaml run.steps=2 --resume",
    ])  # fmt: skip


def test_the_quickstart_with_tools_runs_the_same_without_them_and_compares(sandbox: Sandbox) -> None:
    """All that is given goes to both runs, and to the lines about them."""
    code, ran = start(sandbox, "tools", "run.steps=2", "--resume")
    made, (first, second, *shown) = ran[:2], ran[2:]
    assert code == 0 and made == [
        "python scripts/make_tiny_moe.py --tools --out models/tiny-qwen3-moe-tools",
        "python scripts/make_arithmetic.py --tools --out data/tools",
    ]
    assert (first, second) == (f"{TOOLS} run.steps=2 --resume", f"{TOOLS} run.steps=2 --resume {WITHOUT}")
    assert [line.partition(" recipes/")[2] for line in shown] == [
        line.partition(" recipes/")[2] for line in (first, second)
    ]  # fmt: skip
    assert all(line.startswith("python scripts/show_accuracies.py held-out products with") for line in shown)


@pytest.mark.parametrize(("ends", "runs"), [(FIRST_ENDS, 1), (SECOND_ENDS, 2)])
@pytest.mark.parametrize("code", [1, 75, 130])
def test_a_run_that_fails_ends_the_quickstart_with_tools_with_its_code(
    sandbox: Sandbox, ends: str, runs: int, code: int
) -> None:
    found, ran = start(sandbox, "tools", megarl=ends.format(code))
    assert found == code and len([line for line in ran if line.startswith("megarl")]) == runs
    assert not [line for line in ran if "show_accuracies" in line]


def show(folder: Path, since: float, *arguments: str) -> str:
    command = [sys.executable, ROOT / "scripts" / "show_accuracies.py", "with it", str(since)]
    recipe = ROOT / "recipes" / "quickstart_tools.yaml"
    done = subprocess.run([*command, recipe, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_accuracies_of_the_last_run_are_one_line(tmp_path: Path) -> None:
    """Of the folder that the run has taken; other runs whose names begin so are none of it."""
    records = [
        {"step": 0, "eval/accuracy": 0.0},
        {"step": 0, "warm_start/loss": 2.0},
        {"step": 0, "warm_start/loss": 1.0, "eval/accuracy": 0.5},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "eval/accuracy": 0.978},
    ]
    for number, name in enumerate(["mine", "mine-2", "mine-without"]):
        folder = tmp_path / "here" / name
        folder.mkdir(parents=True)
        lines = records if name == "mine-2" else [{"step": 0, "eval/accuracy": 0.1}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        os.utime(folder / "metrics.jsonl", (1000 + number, 1000 + number))
    keys = ["run.dir=here", "--resume", "run.name=mine"]
    (line,) = show(tmp_path, 1000.5, *keys).splitlines()
    assert " ".join(line.split()) == "with it before 0.0% warm start 50.0% step 2 97.8%"
    assert show(tmp_path, 1001.5, *keys) == "", "nothing was recorded since, as in a dry run"
    assert show(tmp_path, 0, "run.name=gone") == ""
