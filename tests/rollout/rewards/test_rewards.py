"""A reward is found by its name, and whatever it does wrong is the user's fault, said in a line."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.printable import describe_error, short
from megarl.rollout.rewards import load_reward, takes_episode
from megarl.rollout.rewards.exact import score
from megarl.types import UserError
from megarl.types.reward_result import Failure, RewardResult, reward_result_of

EXACT = "megarl.rollout.rewards.exact:score"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("megarl.rollout.rewards.exact", "is not module:function"),
        (":score", "is not module:function"),
        ("megarl.rollout.rewards.exact:", "is not module:function"),
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("megarl.rollout.rewards.exact:scores", "has no 'scores'"),
        ("megarl.rollout.rewards:WHERE", "is a str, not a function"),
    ],
)
def test_a_bad_path_is_named(path: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_reward(path, {})
    assert caught.value.where == "reward.function"
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    "words", ["raise RuntimeError('no licence')", "raise SystemExit('no licence')"]
)
def test_a_module_that_raises_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (tmp_path / "broken_reward.py").write_text(f"{words}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="(RuntimeError|SystemExit): no licence"):
        load_reward("broken_reward:score", {})


def test_arguments_that_it_does_not_take_are_named() -> None:
    with pytest.raises(UserError, match="unexpected keyword argument 'wrng'") as caught:
        load_reward(
            "megarl.rollout.rewards.math:score", {"wrng": -1.0}, "reward.by_source.gsm8k.function"
        )
    assert caught.value.where == "reward.by_source.gsm8k.function"
    assert "write into reward.by_source.gsm8k.arguments what it takes" in caught.value.hint


def test_episode_is_no_argument_of_a_recipe() -> None:
    path = "tests.rollout.rewards.odd_rewards:of_episode"
    assert load_reward(EXACT, {}) is score
    assert takes_episode(load_reward(path, {})) and not takes_episode(score)
    assert not takes_episode(min), "a builtin without a signature"
    with pytest.raises(UserError, match="'episode' is megarl's own") as caught:
        load_reward(path, {"episode": 1}, "reward.by_source.gsm8k.function")
    assert caught.value.where == "reward.by_source.gsm8k.arguments"
    with pytest.raises(
        UserError, match=r"\(response, answer, row, episode=...\): missing .* 'share'"
    ):
        load_reward(f"{path}_later", {})


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        "1",
        None,
        1j,
        Decimal(1),
        RewardResult(math.nan, True),
        1e39,
        10**400,
        [1.0],
        np.nan,
    ],
)
def test_what_is_no_finite_number_is_a_failure(value: Any) -> None:
    result = reward_result_of(value)
    assert isinstance(result, Failure)
    assert "returned" in result.words


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), True, 2, RewardResult(0.5, True)]
)
def test_numbers_of_all_kinds_are_reward_results(value: Any) -> None:
    result = reward_result_of(value)
    assert isinstance(result, RewardResult)
    assert type(result.reward) is float and type(result.correct) is bool


@given(value=st.floats(min_value=-3e38, max_value=3e38), correct=st.booleans())
def test_a_number_is_correct_from_one_upwards_and_a_reward_result_says_so_itself(
    value: float, correct: bool
) -> None:
    assert reward_result_of(value) == RewardResult(value, value >= 1.0)
    assert reward_result_of(RewardResult(value, correct)) == RewardResult(value, correct)


def test_words_are_one_short_line() -> None:
    assert describe_error(KeyError("level\nof row")) == r"KeyError: 'level\nof row'"
    assert "\n" not in describe_error(ValueError("a\nb"))
    assert len(describe_error(ValueError("x" * 10_000))) == 300
    assert short("x" * 10_000).endswith("...") and len(short("x" * 10_000)) == 80


@pytest.mark.parametrize(
    ("response", "expected"), [("12", 1.0), (" 12\n", 1.0), ("1 2", 0.0), ("", 0.0), ("12.", 0.0)]
)
def test_exact(response: str, expected: float) -> None:
    assert score(response, "12", {}) == expected
