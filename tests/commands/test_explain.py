"""`megarl explain` and `megarl schema`, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl import cli
from megarl.commands.explain import explained
from megarl.config.reference import recipe_keys

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "matplotlib")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)  # this process is pytest's
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "120")


def megarl(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_a_key_is_explained_in_lines() -> None:
    code, out, err = megarl("explain", "train.lr")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "train.lr"
    labels = dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", out, re.MULTILINE))
    assert labels["type"] == "number from 1e-15 to 10"
    assert labels["default"] == "none: it has to be set"
    assert labels["meaning"] == "Learning rate of AdamW for the policy, after the warm-up."
    assert "controller" in labels["read in"] and "not read" not in labels


def test_a_key_that_some_runs_do_not_read_says_so() -> None:
    _, out, _ = megarl("explain", "train.lr_end")
    assert re.search(r"^  not read +where train.lr_schedule is constant$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("branch", "rooms", "others"),
    [
        ("run.steps", {"controller", "tracking"}, {"resharding", "model"}),
        ("warm_start", {"controller"}, {"training", "fleet"}),
        ("reshard.verify", {"fleet", "plan"}, {"data", "tracking"}),
    ],
)
def test_the_parts_of_the_code_that_read_a_branch(
    branch: str, rooms: set[str], others: set[str]
) -> None:
    lines = explained(branch, whole=False).partition("read in")[2].partition("(the parts")[0]
    found = set(re.findall(r"\w+", lines))
    assert rooms <= found and not others & found


def test_a_branch_is_a_table_of_its_keys() -> None:
    code, out, _ = megarl("explain", "checkpoint")
    assert code == 0
    table = out[out.index("\nkey ") :]
    names = re.findall(r"^(\w+) +\S+ +\S", table, re.MULTILINE)
    keys = [key.name for path, key in recipe_keys().items() if path.startswith("checkpoint.")]
    assert names == ["key", *keys]
    assert max(map(len, out.splitlines())) <= 120


def test_without_a_key_every_branch_is_named() -> None:
    code, out, _ = megarl("explain")
    assert code == 0
    branches = [path for path in recipe_keys() if "." not in path]
    assert re.findall(r"^(\w+) +branch  ", out, re.MULTILINE) == branches


@pytest.mark.parametrize("path", list(recipe_keys()))
def test_every_key_can_be_explained(path: str) -> None:
    text = explained(path, whole=False)
    assert text.startswith(f"{path}\n") and "None" not in text.splitlines()[1]


def test_an_unknown_key_is_one_line_and_code_2() -> None:
    assert megarl("explain", "train.lrr") == (
        2,
        "",
        "train.lrr: there is no such key; did you mean train.lr?\n",
    )


def test_the_schema_is_json_in_both_forms() -> None:
    whole, overlay = (json.loads(megarl("schema", *more)[1]) for more in ((), ("--overlay",)))
    assert "train" in whole["required"] and "required" not in overlay
    assert whole["properties"].keys() == overlay["properties"].keys()


@pytest.mark.parametrize("arguments", [("explain", "algorithm"), ("schema",), ("explain",)])
def test_neither_imports_anything_heavy(arguments: tuple[str, ...]) -> None:
    program = f"""
import sys
from megarl import cli
try:
    cli.app({list(arguments)!r})
except SystemExit as end:
    print(end.code, *[name for name in {HEAVY!r} if name in sys.modules])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stderr
