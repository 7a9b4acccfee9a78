"""Whether a response matches a pattern, and, if wanted, the reward of the answer inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megarl.rollout.rewards import EPISODE, Reward, load_reward, takes_episode
from megarl.types.json_objects import CallArguments, Columns
from megarl.types.reward_result import RewardResult, reward_result_of

THINK_ANSWER = r"<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?P<answer>(?:(?!</?answer>).)*)</answer>"


def score(
    response: str,
    answer: str,
    row: Columns,
    *,
    pattern: str = THINK_ANSWER,
    function: str | None = None,
    arguments: CallArguments | None = None,
    reward: float = 1.0,
    wrong: float = 0.0,
    episode: Mapping[str, Any] | None = None,
) -> float | RewardResult:
    """`wrong` unless the whole response, without white space around it, matches the pattern, where . is any character.

    Else `reward`. With a function (`module:function`, and arguments for it) `reward` plus the function's reward for the
    pattern's group `answer`, or for the whole response if it has none; correct if the function says so. It gets the
    episode if it takes one. A pattern that takes too long ends its worker. Raises ValueError where the function has no
    verdict.
    """
    match = re.fullmatch(pattern, response.strip(), re.DOTALL)
    if match is None:
        return RewardResult(wrong, False, "")
    if function is None:
        return reward
    # a group that took no part in the match is None
    inner_response = match.groupdict().get("answer", response) or ""
    inner = _inner(function)
    more = {EPISODE: episode} if takes_episode(inner) else {}
    reward_result = reward_result_of(
        inner(inner_response.strip(), answer, row, **more, **(arguments or {}))
    )
    if not isinstance(reward_result, RewardResult):
        raise ValueError(f"{function} {reward_result.words}")
    inner_answer = inner_response.strip() if reward_result.answer is None else reward_result.answer
    return RewardResult(reward + reward_result.reward, reward_result.correct, inner_answer)


@lru_cache(maxsize=8)
def _inner(function: str) -> Reward:
    return load_reward(function, {}, "reward.arguments.function")
