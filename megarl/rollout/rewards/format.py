"""The shape of a response, and, if wanted, what another reward says of the answer inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megarl.rollout.rewards import Reward, Verdict, load_reward, verdict_of

THINK_ANSWER = r"<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?P<answer>(?:(?!</?answer>).)*)</answer>"


def score(
    response: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    pattern: str = THINK_ANSWER,
    function: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    reward: float = 1.0,
    wrong: float = 0.0,
) -> float | Verdict:
    """`wrong` unless the whole response but for white space around it is as the pattern says, where . is any character.

    Else `reward`; with a function (`module:function`, and arguments for it) `reward` plus what that says of the
    pattern's group `answer`, or of the whole response if it has none, and correct if that is. A pattern that takes too
    long ends its worker. Raises ValueError where the function has no verdict.
    """
    found = _compiled(pattern).fullmatch(response.strip())
    if found is None:
        return Verdict(wrong, False, "")
    if function is None:
        return reward
    content = found.groupdict().get("answer") or ""
    given = content if "answer" in found.groupdict() else response
    verdict = verdict_of(_inner(function)(given.strip(), answer, row, **(arguments or {})))  # type: ignore[call-arg]
    if not isinstance(verdict, Verdict):
        raise ValueError(f"{function} {verdict.words}")
    said = given.strip() if verdict.answer is None else verdict.answer
    return Verdict(reward + verdict.reward, verdict.correct, said)


@lru_cache(maxsize=8)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


@lru_cache(maxsize=8)
def _inner(function: str) -> Reward:
    return load_reward(function, {}, "reward.arguments.function")
