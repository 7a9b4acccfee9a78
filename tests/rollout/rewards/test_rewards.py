"""A reward is found by its name, and whatever it does wrong is the user's fault, said in a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.rewards import Verdict, judge, load_reward
from megarl.rollout.rewards.exact import score
from megarl.types import UserFault


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
    with pytest.raises(UserFault) as caught:
        load_reward(path)
    assert caught.value.where == "reward.function"
    assert problem in caught.value.problem


def test_a_module_that_raises_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserFault, match="RuntimeError: no licence"):
        load_reward("broken_reward:score")


def test_the_shipped_reward_is_found() -> None:
    assert load_reward("megarl.rollout.rewards.exact:score") is score


def returns(value: Any) -> Any:
    def reward(response: str, answer: str, row: Mapping[str, Any]) -> Any:
        return value

    return reward


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, 1j, Verdict(math.nan, True)])
def test_what_is_no_finite_number_is_refused_with_the_response(value: Any) -> None:
    with pytest.raises(UserFault, match="on response 'r', answer 'a'") as caught:
        judge(returns(value), "r", "a", {})
    assert caught.value.where == "reward.function"


def test_what_it_raises_is_told_in_a_line() -> None:
    def reward(response: str, answer: str, row: Mapping[str, Any]) -> float:
        raise KeyError("level\nof row")

    with pytest.raises(UserFault, match="raised KeyError") as caught:
        judge(reward, "r", "a", {})
    assert "\n" not in str(caught.value)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_correct_from_one_upwards(value: float) -> None:
    assert judge(returns(value), "", "", {}) == Verdict(value, value >= 1.0)


@given(value=st.floats(allow_nan=False, allow_infinity=False), correct=st.booleans())
def test_a_verdict_says_itself_what_is_correct(value: float, correct: bool) -> None:
    assert judge(returns(Verdict(value, correct)), "", "", {}) == Verdict(value, correct)


def test_it_sees_the_response_the_answer_and_the_row() -> None:
    seen: list[Any] = []

    def reward(*arguments: Any) -> int:
        seen.extend(arguments)
        return 1

    assert judge(reward, "r", "a", {"level": 2}) == Verdict(1.0, True)
    assert seen == ["r", "a", {"level": 2}]


@pytest.mark.parametrize(("response", "expected"), [("12", 1.0), (" 12\n", 1.0), ("1 2", 0.0), ("", 0.0), ("12.", 0.0)])
def test_exact(response: str, expected: float) -> None:
    assert score(response, "12", {}) == expected
