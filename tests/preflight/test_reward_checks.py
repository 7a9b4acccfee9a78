"""What is wrong with a recipe's rewards, told before a run. Needs no model: prompts are made here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight.reward_checks import reward_errors
from megarl.types import Prompt

EXACT = "megarl.rollout.rewards.exact:score"
REWARDS = """
import math, os, time
def broken(response, answer, row): raise KeyError("no such unit")
def nan_when_empty(response, answer, row): return 1.0 if response else math.nan
def row_reader(response, answer, row): return float(row["level"] == 3)
def hangs(response, answer, row): time.sleep(1000)
def dies(response, answer, row): os._exit(0)
def last_turn(response, answer, row, *, episode): return float(episode["turns"][-1]["text"] == response)
def first_call(response, answer, row, episode): return float(episode["turns"][0]["calls"][0]["result"])
"""
PROMPTS = [
    Prompt("rows.jsonl:1", "a", (1,), "1", {"data_source": "gsm8k", "level": 3}),
    Prompt("rows.jsonl:2", "b", (1,), "2", {"data_source": "math", "level": 3}),
    Prompt("rows.jsonl:3", "c", (1,), "3", {"level": 3}),
    Prompt("rows.jsonl:4", "d", (1,), "4", {"data_source": None, "level": 3}),
]


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))


def small_recipe(engine: Mapping[str, Any] = {}, **branches: Any) -> Recipe:
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 8}
    return Recipe.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "none"},
            "data": {"train": "train.jsonl"},
            "rollout": {**rollout, "engine": engine},
            "train": {"lr": 1e-3},
            "placement": {"gpus": 1},
            **branches,
        }
    )


def told(*, episode: dict[str, Any] | None = None, **reward: Any) -> list[str]:
    recipe = small_recipe(episode=episode, reward=reward)
    return [str(error) for error in reward_errors(recipe, PROMPTS)]


def by_source(*names: str, **keys: Any) -> dict[str, Any]:
    return {name: {"function": EXACT, **keys} for name in names}


@pytest.mark.parametrize(
    "reward",
    [
        {"function": EXACT},
        {"function": "faulty_rewards:row_reader"},
        {"function": EXACT, "by_source": by_source("gsm8k", "absent")},
        {"by_source": by_source("3"), "source": "level"},
        {"function": "megarl.rollout.rewards.math:score", "arguments": {"wrong": -1.0}},
        {"function": EXACT, "on_failure": "penalise", "penalty": -1.0},
    ],
)
def test_what_is_right(reward: dict[str, Any]) -> None:
    assert told(**reward) == []


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({}, "reward.function: is not set, and nothing else gives rewards; "),
        (
            {"function": EXACT, "penalty": -1.0},
            "reward.penalty: -1.0 is set, and reward.on_failure is drop; ",
        ),
        (
            {"function": EXACT, "arguments": {"wrong": 0.0}},
            f"reward.function: {EXACT} cannot be called with (response, answer, row, wrong=...): got an unexpected",
        ),
        (
            {"by_source": by_source("gsm8k", "math")},
            "reward.by_source: rows.jsonl:3: 'data_source' is not there (and 1 more such rows), which reward.by_source",
        ),
        (
            {"function": "faulty_rewards:broken"},
            "reward.function: raised KeyError: 'no such unit' on response '1' to rows.jsonl:1",
        ),
        (
            {"function": "faulty_rewards:nan_when_empty"},
            "reward.function: returned nan on response '' to rows.jsonl:1, answer '1'",
        ),
        (
            {"function": "faulty_rewards:hangs", "timeout_s": 0.5},
            "reward.function: took longer than 0.5 s on response",
        ),
        (
            {"function": "faulty_rewards:dies"},
            "reward.function: ended its process (exit code 0) on response '1'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(reward: dict[str, Any], says: str) -> None:
    (line,) = told(**reward)
    assert line.startswith(says)
    assert "sk-12345" not in line


def test_functions_of_episodes_are_tried_on_one() -> None:
    """On one without a call, which some episodes of a run are; without episodes they get None."""
    episode = {"tools": ["megarl.environments.calculator:calculate"], "max_tokens": 8}
    assert (
        told(episode=episode, function="faulty_rewards:last_turn")
        == told(episode=episode, function=EXACT)
        == []
    )
    (line,) = told(episode=episode, function="faulty_rewards:first_call")
    assert line.startswith(
        "reward.function: raised IndexError: list index out of range on response '1'"
    )
    (line,) = told(function="faulty_rewards:last_turn")
    assert line.startswith(
        "reward.function: raised TypeError: 'NoneType' object is not subscriptable"
    )


def test_all_errors_are_told_at_once() -> None:
    bad = {
        "gsm8k": {"function": "faulty_rewards:gone"},
        "math": {"function": "faulty_rewards:broken"},
        "other": {"function": EXACT, "arguments": {"x": 1}},
    }
    lines = told(by_source=bad, arguments={"x": 1}, penalty=1.0, on_failure="stop")
    starts = [
        "reward.arguments: are set, and there is no reward.function",
        "reward.penalty: 1.0 is set, and reward.on_failure is stop",
        "reward.by_source: rows.jsonl:3: ",
        "reward.by_source.gsm8k.function: faulty_rewards has no 'gone'",
        "reward.by_source.math.function: raised KeyError: 'no such unit' on response '2'",
        "reward.by_source.other.function: megarl.rollout.rewards.exact:score cannot be called with",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


CODE = "megarl.rollout.rewards.code:score"


def test_functions_of_ours_are_given_the_time_that_they_may_take() -> None:
    lines = told(function=CODE, arguments={"unsafe": True})
    message = f"reward.timeout_s: 5 is too little beside the 30 s that total_s gives {CODE}; set it to 35, or total_s"
    assert [line[: len(message)] for line in lines] == [message]
    asks = {
        "function": "megarl.rollout.rewards.llm_judge:score",
        "arguments": {"url": "u", "model": "m"},
    }
    by_source = {"math": asks}
    enough = told(function=CODE, arguments={"unsafe": True, "total_s": 10}, timeout_s=15.0)
    assert not any(line.startswith("reward.timeout_s") for line in enough)
    assert any(
        "beside the 60 s that timeout_s gives" in line
        for line in told(function=EXACT, by_source=by_source)
    )


def test_programs_without_isolation_are_told_of_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "megarl.isolation.sandbox.find_problem", lambda: "bubblewrap (bwrap) is not installed"
    )
    (line,) = told(function=CODE, timeout_s=60.0)
    assert line.startswith("reward.function: bubblewrap (bwrap) is not installed; ")
    (line,) = told(function=CODE, timeout_s=60.0, arguments={"url": "sandbox.local"})
    assert line.startswith("reward.function: url 'sandbox.local' is not the address of a service")
