"""Rewards: a function of a response, its answer and the data row, named in the recipe as `module:function`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from megarl.types import UserFault

WHERE = "reward.function"
_MEND = "write module:function, for example megarl.rollout.rewards.exact:score"


@dataclass(frozen=True)
class Verdict:
    """What a response is worth, and whether it counts as correct in the accuracy."""

    reward: float
    correct: bool


Reward = Callable[[str, str, Mapping[str, Any]], "float | Verdict"]


def load_reward(path: str) -> Reward:
    """The function at `module:function`. Raises UserFault(reward.function) when there is none."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserFault(WHERE, f"{path!r} is not module:function", _MEND)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module raises whatever it likes while it is imported
        raise UserFault(WHERE, f"{module_name} cannot be imported ({_said(error)})", "mend or install it") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserFault(WHERE, f"{module_name} has no {name!r}", _MEND)
    if not callable(function):
        raise UserFault(WHERE, f"{path} is a {type(function).__name__}, not a function", _MEND)
    return cast(Reward, function)


def judge(reward: Reward, response: str, answer: str, row: Mapping[str, Any]) -> Verdict:
    """Score one response; a bare number is correct from 1 upwards.

    Raises UserFault(reward.function) when the function raises or returns no finite number.
    """
    try:
        result = reward(response, answer, row)
    except Exception as error:  # a user's function
        problem = f"raised {_said(error)} on response {response!r}, answer {answer!r}"
        raise UserFault(WHERE, problem, "make it return a number for every response") from error
    value = result.reward if isinstance(result, Verdict) else result
    if not isinstance(value, Real) or not math.isfinite(value):
        problem = f"returned {result!r} on response {response!r}, answer {answer!r}"
        raise UserFault(WHERE, problem, "make it return a finite number or a Verdict")
    return Verdict(float(value), result.correct if isinstance(result, Verdict) else float(value) >= 1.0)


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
