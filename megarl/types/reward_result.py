"""The result of a reward function, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from megarl.printable import short

REWARD_HINT = "make it return a finite number for every response"
LARGEST_REWARD = 3.4e38  # rewards are float32
_LONGEST_ANSWER = 1000  # characters; longer answers that begin alike count as one in the vote


@dataclass(frozen=True)
class RewardResult:
    """A response's reward, and whether it counts as correct in the accuracy.

    answer: the answer that the response gives, for the vote of an evaluation's maj@k; "" if it gives none; None: the
    whole response.
    """

    reward: float
    correct: bool
    answer: str | None = None


@dataclass(frozen=True)
class Failure:
    """The reason why there is no verdict, in a few words."""

    words: str


def reward_result_of(result: Any) -> RewardResult | Failure:
    """A function's return value as a verdict; a failure if it is not a number that a float32 holds."""
    value = result.reward if isinstance(result, RewardResult) else result
    if not isinstance(value, Real):
        return Failure(f"returned {short(result)}")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond all floats
        return Failure(f"returned a {type(value).__name__} that is no finite number")
    if not (isfinite(reward) and abs(reward) <= LARGEST_REWARD):
        return Failure(f"returned {short(result)}")
    if not isinstance(result, RewardResult):
        return RewardResult(reward, reward >= 1.0)
    answer = None if result.answer is None else str(result.answer)[:_LONGEST_ANSWER]
    return RewardResult(reward, bool(result.correct), answer)
