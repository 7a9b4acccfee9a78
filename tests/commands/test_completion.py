"""What a shell offers, asked through bash itself with the script that the command prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.commands.completion import complete_key, complete_override
from megarl.config.reference import recipe_keys

ROOT = Path(__file__).parents[2]


def offered(incomplete: str, *before: str) -> list[str]:
    return complete_override(SimpleNamespace(params={"overrides": list(before)}), incomplete)


def test_keys_of_the_branch_that_is_written_are_offered() -> None:
    assert offered("train.lr") == ["train.lr=", "train.lr_schedule=", "train.lr_end="]
    assert offered("roll")[:2] == ["rollout.", "rollout.prompts_per_step="]
    assert "rollout.engine." in offered("rollout.") and offered("nothing.of") == []
    assert complete_key("train.lr") == ["train.lr", "train.lr_schedule", "train.lr_end"]


def test_keys_under_a_name_of_the_users_own_are_offered() -> None:
    assert offered("data.eval.aime.p") == ["data.eval.aime.path=", "data.eval.aime.prompt="]
    assert complete_key("reward.by_source.gsm8k.fun") == ["reward.by_source.gsm8k.function"]
    assert offered("data.train.0.pa")[0] == "data.train.0.path="
    assert offered("train.aime.p") == []


def test_a_key_that_is_alone_comes_with_its_choices_or_its_default() -> None:
    """One candidate alone would get a space behind it."""
    schedules = ["constant", "linear", "cosine"]
    words = [f"train.lr_schedule={each}" for each in schedules]
    assert offered("train.lr_s") == ["train.lr_schedule=", *words]
    assert offered("train.lr_schedule=l") == words
    assert offered("train.wei") == ["train.weight_decay=", "train.weight_decay=0"]
    assert offered("checkpoint.asy")[1:] == [
        f"checkpoint.asynchronous={b}" for b in ("true", "false")
    ]


def test_the_value_alone_is_offered_where_bash_has_split_the_word() -> None:
    assert offered("l", "train.lr_schedule", "=") == ["constant", "linear", "cosine"]
    assert offered("", "train.lr_schedule") == ["constant", "linear", "cosine"]
    assert offered("x", "data.train", "=") == [], "the shell completes files then"


def test_overlays_and_folders_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    for name in ("more.yaml", "other.txt", "recipes/big.yaml", "recipes/small.yml"):
        Path(name).touch()
    assert offered("mo")[-1] == "more.yaml" and offered("oth") == []
    assert offered("recipes") == ["recipes/", "recipes/big.yaml", "recipes/small.yml"]


def test_whatever_is_offered_is_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(
        tmp_path
    )  # folders of the checkout are offered too, and the quickstart makes `models`
    for path, key in recipe_keys().items():
        for word in offered(path):
            assert word.partition("=")[0].rstrip(".") in recipe_keys(), key


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_commands_options_keys_and_values(tmp_path: Path) -> None:
    command = tmp_path / "megarl"
    command.write_text(f"#!{sys.executable}\nfrom megarl.cli import main\nmain()\n")
    command.chmod(0o755)
    program = """
eval "$(_MEGARL_COMPLETE=source_bash megarl)"
complete -p megarl
offer() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    _megarl_completion megarl
    echo "${COMPREPLY[@]}"
}
offer megarl dr
offer megarl train --dr
offer megarl train recipe.yaml train.lr
offer megarl train recipe.yaml train.lr=1e-4 train.lr_schedule = l
offer megarl train recipe.yaml train.lr_schedule =
offer megarl explain reshard.v
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.splitlines() == [
        "complete -o default -F _megarl_completion megarl",
        "drain",
        "--dry-run",
        "train.lr= train.lr_schedule= train.lr_end=",
        "linear",
        "constant linear cosine",
        "reshard.verify",
    ]
