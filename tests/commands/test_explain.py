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
from megarl.config.reference import recipe_keys, written

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
    assert labels["meaning"] == "Learning rate for the policy, after the warm-up."
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
    lines = explained(branch).partition("read in")[2].partition("(the parts")[0]
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
    text = explained(path)
    assert text.startswith(f"{path}\n") and "None" not in text.splitlines()[1]


def test_an_unknown_key_is_one_line_and_code_2() -> None:
    assert megarl("explain", "train.lrr") == (
        2,
        "",
        "train.lrr: there is no such key; did you mean train.lr?\n",
    )


def value_line(path: str, *overrides: str, recipe: str = "quickstart.yaml") -> str:
    code, out, err = megarl("explain", path, str(ROOT / "recipes" / recipe), *overrides)
    assert (code, err) == (0, "")
    lines = out[out.index("  value ") : out.index("  read in ")].partition("  not read ")[0]
    return " ".join(lines.split()).removeprefix("value ")


@pytest.mark.parametrize(
    ("path", "overrides", "expected"),
    [
        ("train.lr", ["train.lr=1e-4"], "0.0001 (set in the recipe)"),
        ("train.z_loss", [], "0 (the default)"),
        ("algorithm.clip_high", ["algorithm={name: gspo}"], "0.0004 (of the row of gspo)"),
        ("algorithm.name", [], "grpo (set in the recipe)"),
        ("algorithm.gamma", ["algorithm.name=nothing"], "null (the default)"),
        ("checkpoint.every", ["checkpoint.every=null"], "null (set in the recipe)"),
        (
            "critic.ranks.tp",
            [],
            "null (the default) This run does not read it: grpo has no critic.",
        ),
        ("episode.max_tokens", [], "none (episode is not set)"),
        ("data.eval.arith.path", ["data.eval.arith=a.jsonl"], "a.jsonl (set in the recipe)"),
        ("data.eval.other.path", [], "none (data.eval.other is not set)"),
        ("data.train.0.path", ["data.train=[a.jsonl]"], "a.jsonl (set in the recipe)"),
        ("data.train.7.path", [], "none (data.train.7 is not set)"),
        ("train.megatron.n", ["train.megatron={n: 3}"], "3 (set in the recipe)"),
        ("train.megatron.m", ["train.megatron={n: 3}"], "none (train.megatron.m is not set)"),
    ],
)
def test_the_value_in_a_recipe(path: str, overrides: list[str], expected: str) -> None:
    assert value_line(path, *overrides) == expected


def test_a_key_that_the_run_of_a_recipe_does_not_read() -> None:
    is_read = value_line("train.lr_end", "train.lr_schedule=cosine", "train.lr_end=0.5")
    assert is_read == "0.5 (set in the recipe)"
    unread = value_line("train.lr_end", "train.lr_schedule=constant", "train.lr_end=0.5")
    assert unread.endswith("This run does not read it: train.lr_schedule is constant.")


def test_a_branch_has_the_values_of_a_recipe() -> None:
    code, out, _ = megarl(
        "explain", "train", str(ROOT / "recipes" / "quickstart.yaml"), "train.lr=0.5"
    )
    table = out[out.index("\nkey ") :]
    rows = dict(re.findall(r"^(\w+) +(\S+) +\S", table, re.MULTILINE))
    assert code == 0 and rows["key"] == "value"
    assert (rows["lr"], rows["grad_clip"]) == ("0.5", "1")


def test_the_errors_of_the_recipe_are_told() -> None:
    code, out, err = megarl(
        "explain", "train.lr", str(ROOT / "recipes" / "quickstart.yaml"), "train.lrr=1"
    )
    assert (code, out) == (2, "") and "unknown key train.lrr" in err


def test_a_number_has_all_digits_that_tell_it_from_others() -> None:
    assert (written(0.12345678), written(1e-6), written(1.0)) == ("0.12345678", "1e-06", "1")


def test_the_schema_is_json_in_all_forms() -> None:
    whole, overlay = (json.loads(megarl("schema", *more)[1]) for more in ((), ("--overlay",)))
    assert "train" in whole["required"] and "required" not in overlay
    assert whole["properties"].keys() == overlay["properties"].keys()
    hardware = json.loads(megarl("schema", "--hardware")[1])
    assert all(key["description"] for key in hardware["properties"].values())
    assert megarl("schema", "--hardware", "--overlay")[0] == 2


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
