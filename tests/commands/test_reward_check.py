"""`megarl reward-check` on small files: what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.samples.parquet import writing
from megarl.types import Prompt, SampleGroup
from tests.samples.responses import response
from tests.training.episodes import episode

REWARDS = """
import re, time
def good(response, answer, row): return float(response == answer)
def worth(response, answer, row, *, right, unit): return right if response == answer and unit == row["unit"] else 0.0
def slow(response, answer, row): re.fullmatch(r"(a+)+", response); return float(response == answer)
def always(response, answer, row): return 1.0
def turns(response, answer, row, *, episode): return float(len(episode["turns"]))
def nothing(response, answer, row): return 1.0 / len(response)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checked_rewards.py").write_text(REWARDS)
    rows = [{"question": n, "answer": str(n % 3), "unit": "m"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(arguments: str, code: int = 0) -> Result:
    """The command with a function of `REWARDS`, by its name, and the other arguments."""
    done = CliRunner().invoke(app, ["reward-check", *f"checked_rewards:{arguments}".split()])
    assert done.exit_code == code, done.output
    return done


def test_a_good_reward() -> None:
    done = run("good --data rows.jsonl --rows 9")
    table = [line.split() for line in done.stdout.splitlines()]
    assert table[1][-4:] == ["9", "1.000", "100.0%", "0"]
    assert table[2][-4:] == ["9", "0.000", "0.0%", "0"]
    assert table[3][-4:] == ["9", "0.000", "0.0%", "0"]
    assert table[4][0] == "bombs" and table[4][-1] == "0"


def test_arguments_are_json_or_text() -> None:
    done = run("worth --data rows.jsonl --argument right=2.5 --argument unit=m")
    assert done.stdout.splitlines()[1].split()[-4:] == ["12", "2.500", "100.0%", "0"]


def test_what_takes_too_long_is_told_and_ends_with_1() -> None:
    done = run("slow --data rows.jsonl --timeout-s 1", code=1)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("failed 1 x: took longer than 1 s, first on response 'aaaa")


def test_what_raises_is_told_by_kind() -> None:
    done = run("nothing --data rows.jsonl", code=1)
    assert (
        "failed 12 x: raised ZeroDivisionError: float division by zero, first on response '' to rows.jsonl:1"
        in done.stdout
    )


def test_a_reward_that_likes_everything_is_noticed() -> None:
    done = run("always --data rows.jsonl")
    assert "a row's own answer is worth no more than another's" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "gone --data rows.jsonl",
            "reward.function: checked_rewards has no 'gone'",
        ),
        ("good --data gone.jsonl", "--data: gone.jsonl is not a file"),
        (
            "good --data rows.jsonl --answer a",
            "more such rows); set --answer to one of",
        ),
        ("worth --data rows.jsonl", "missing a required argument: 'right'"),
        (
            "good --data rows.jsonl --argument x",
            "--argument x: is not of the form",
        ),
        ("good", "--data: either it or --samples must be given"),
        (
            "good --data rows.jsonl --samples x",
            "--data: either it or --samples must",
        ),
        (
            "good --samples rows.jsonl",
            "rows.jsonl: not a complete file of samples",
        ),
    ],
)
def test_errors_end_with_2(arguments: str, says: str) -> None:
    done = run(arguments, code=2)
    assert says in done.stderr


def samples_of(folder: Path) -> str:
    """Of two prompts: two episodes, of which one is right, and a plain sample."""
    rng = np.random.default_rng(0)
    turn = {"role": "assistant", "text": "2", "calls": [], "reward": 0.0}
    prompt = Prompt("rows.jsonl:1", "2+2=", (1, 2), "4", {"unit": "m"})
    transcript: Any = (turn, turn | {"text": "4"})
    right, wrong = (
        replace(episode(prompt, rng, 2), text=text, transcript=transcript) for text in ("4", "5")
    )
    plain = response((1, 2), np.arange(3), text="4")
    groups = [
        SampleGroup(
            prompt, (right, wrong), np.array([1.0, 0.0], np.float32), np.array([True, False])
        ),
        SampleGroup(prompt, (plain,), np.array([0.1], np.float32), np.array([False])),
    ]
    with writing(folder / "samples.parquet", 99, 1.0) as file:
        file.write(groups[:1])
        file.write(groups[1:])
    return "samples.parquet"


def test_the_samples_of_a_file_are_scored_anew(folder: Path) -> None:
    done = run(f"good --samples {samples_of(folder)}")
    _, before, anew, changes, _ = done.stdout.splitlines()
    assert before.split()[-4:] == ["3", "0.367", "33.3%", "0"]
    assert anew.split()[-4:] == ["3", "0.667", "66.7%", "0"]
    assert (
        changes == "1 of 3 rewards changed; 1 samples became correct, and 0 are correct no longer"
    )


def test_episodes_of_a_file_are_given_to_functions_that_take_them(folder: Path) -> None:
    done = run(f"turns --samples {samples_of(folder)} --rows 1")
    assert done.stdout.splitlines()[2].split()[-4:] == ["2", "2.000", "100.0%", "0"]
    done = run(f"turns --samples {samples_of(folder)}", code=1)
    assert "2 of 2 rewards changed; 1 samples became correct" in done.stdout
    assert "failed 1 x: raised TypeError: 'NoneType'" in done.stdout
