"""The quickstart's script: what it runs with which keys, how it ends, and the lines that compare its two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.placement.roles import resolve
from megarl.preflight.checks_by_command import errors_elsewhere
from tests.scripts.test_scripts import ROOT, Sandbox, with_gpus

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
    done = sandbox.run("bash", f"{sandbox.repo}/scripts/quickstart.sh", *arguments)
    ran = [line.replace("BIN/", "").replace("REPO/.venv/bin/", "") for line in sandbox.commands()]
    return done.returncode, [
        line for line in ran if line.startswith(("megarl ", "python scripts/"))
    ]


def test_the_quickstart_is_one_run_whose_end_is_its_own(sandbox: Sandbox) -> None:
    code, ran = start(sandbox, "run.steps=2", "--resume", megarl="exit 75")
    assert (code, ran) == (75, [
        "python scripts/make_tiny_moe.py --out models/tiny-qwen3-moe",
        "python scripts/make_arithmetic.py --out data",
        "megarl train recipes/quickstart.yaml run.steps=2 --resume",
    ])  # fmt: skip


def test_the_quickstart_with_tools_runs_the_same_without_them_and_compares(
    sandbox: Sandbox,
) -> None:
    """All that is given goes to both runs, and to the lines about them."""
    code, ran = start(sandbox, "tools", "run.steps=2", "--resume")
    makers, (first, second, *shown) = ran[:2], ran[2:]
    assert code == 0 and makers == [
        "python scripts/make_tiny_moe.py --tools --out models/tiny-qwen3-moe-tools",
        "python scripts/make_arithmetic.py --tools --out data/tools",
    ]
    assert (first, second) == (
        f"{TOOLS} run.steps=2 --resume",
        f"{TOOLS} run.steps=2 --resume {WITHOUT}",
    )
    assert [line.partition(" recipes/")[2] for line in shown] == [
        line.partition(" recipes/")[2] for line in (first, second)
    ]  # fmt: skip
    assert all(
        line.startswith("python scripts/show_accuracies.py held-out products with")
        for line in shown
    )


@pytest.mark.parametrize(("ends", "runs"), [(FIRST_ENDS, 1), (SECOND_ENDS, 2)])
@pytest.mark.parametrize("code", [1, 75, 130])
def test_a_run_that_fails_ends_the_quickstart_with_tools_with_its_code(
    sandbox: Sandbox, ends: str, runs: int, code: int
) -> None:
    exit_code, ran = start(sandbox, "tools", megarl=ends.format(code))
    assert exit_code == code and len([line for line in ran if line.startswith("megarl")]) == runs
    assert not [line for line in ran if "show_accuracies" in line]


ONE = "model.dtype=bfloat16 train.tp=1 train.ep=1 rollout.engine.tp=1 train.pp=1 placement.gpus=1"
TWO = "model.dtype=bfloat16 train.tp=2 train.ep=2 rollout.engine.tp=2 train.pp=1 placement.gpus=2"
FOUR = "model.dtype=bfloat16 train.tp=2 train.ep=2 rollout.engine.tp=2"
EIGHT = f"{FOUR} placement.gpus=8 rollout.engine.count=4"


def start_on_gpus(
    sandbox: Sandbox, num_gpus: int, *arguments: str, **environment: str
) -> tuple[int, list[str]]:
    """The exit code on a machine whose nvidia-smi lists so many GPUs, and the runs of megarl."""
    with_gpus(sandbox)
    lines = "".join(
        f'echo "GPU {number}: NVIDIA H800 (UUID: GPU-{number})"\n' for number in range(num_gpus)
    )
    sandbox.stand_in("nvidia-smi", lines or "exit 0")
    sandbox.stand_in("megarl", "exit 0")
    done = sandbox.run("bash", f"{sandbox.repo}/scripts/quickstart.sh", *arguments, **environment)
    ran = [line.replace("BIN/", "") for line in sandbox.commands()]
    return done.returncode, [line for line in ran if line.startswith("megarl ")]


@pytest.mark.parametrize(
    ("num_gpus", "keys"),
    [(1, ONE), (2, TWO), (3, TWO), (4, FOUR), (7, FOUR), (8, EIGHT), (16, EIGHT)],
)
def test_the_quickstart_takes_as_many_slots_as_there_are_gpus(
    sandbox: Sandbox, num_gpus: int, keys: str
) -> None:
    """The caller's own keys come last, where they hold."""
    code, ran = start_on_gpus(sandbox, num_gpus, "run.steps=2", "--resume")
    assert (code, ran) == (0, [f"megarl train recipes/quickstart.yaml {keys} run.steps=2 --resume"])


def test_both_runs_with_tools_take_the_slots(sandbox: Sandbox) -> None:
    code, ran = start_on_gpus(sandbox, 1, "tools")
    assert (code, ran) == (0, [f"{TOOLS} {ONE}", f"{TOOLS} {ONE} {WITHOUT}"])


@pytest.mark.parametrize(
    ("environment", "code", "keys"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5"}, 0, f" {ONE}"),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 0, f" {TWO}"),
        ({"MEGARL_DEVICE": "cpu"}, 0, ""),
    ],
    ids=["one is visible", "two are visible", "the CPU is asked for"],
)
def test_hidden_gpus_give_no_slots(
    sandbox: Sandbox, environment: dict[str, str], code: int, keys: str
) -> None:
    assert start_on_gpus(sandbox, 8, **environment) == (
        code,
        [f"megarl train recipes/quickstart.yaml{keys}"],
    )


def test_gpus_that_are_elsewhere_give_none(sandbox: Sandbox) -> None:
    assert start_on_gpus(sandbox, 0, MEGARL_DEVICE="cuda") == (2, [])


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        *(("quickstart", keys) for keys in (ONE, TWO, FOUR, EIGHT)),
        ("quickstart_tools", EIGHT),
    ],
    ids=["1", "2", "4", "8", "8 with tools"],
)
def test_the_keys_fit_the_recipes_on_gpus(
    recipe: str, keys: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By preflight's own checks of layouts, for GPUs of another machine."""
    # it starts processes
    monkeypatch.setattr("megarl.preflight.checks_by_command.reward_errors", lambda *_, **__: [])
    inputs = request.getfixturevalue(f"{recipe}_inputs")
    roles = resolve(load_recipe(ROOT / "recipes" / f"{recipe}.yaml", [*inputs, *keys.split()]))
    assert errors_elsewhere(roles, "cuda", ())[0] == []


def show(folder: Path, since: float, *arguments: str) -> str:
    command = [sys.executable, ROOT / "scripts" / "show_accuracies.py", "with it", str(since)]
    recipe = ROOT / "recipes" / "quickstart_tools.yaml"
    done = subprocess.run(
        [*command, recipe, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
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
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in lines)
        )
        os.utime(folder / "metrics.jsonl", (1000 + number, 1000 + number))
    keys = ["run.dir=here", "--resume", "run.name=mine"]
    (line,) = show(tmp_path, 1000.5, *keys).splitlines()
    assert " ".join(line.split()) == "with it before 0.0% warm start 50.0% step 2 97.8%"
    assert show(tmp_path, 1001.5, *keys) == "", "nothing was recorded since, as in a dry run"
    assert show(tmp_path, 0, "run.name=gone") == ""
