"""Errors of a recipe's rewards: contradictory keys, rows without a reward function, functions that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Recipe, RewardConfig
from megarl.isolation.http_service import url_errors
from megarl.isolation.sandbox import sandbox_errors
from megarl.rollout.reward_workers.by_source import DEFAULT, RewardWorkers, reward_specs, source_of
from megarl.rollout.reward_workers.reward_process import RewardSpec
from megarl.rollout.rewards import SANDBOX_HINT, WHERE, describe_failure
from megarl.types import EpisodeFacts, Prompt, TranscriptEntry, UserError, episode_dict
from megarl.types.reward_result import REWARD_HINT, Failure

_CODE = "megarl.rollout.rewards.code:score"
# The argument that limits the time of a reward, and its default.
_BOUNDS = {_CODE: ("total_s", 30.0), "megarl.rollout.rewards.llm_judge:score": ("timeout_s", 60.0)}
_SPARE_S = 5.0  # for the reward's start and end


def reward_errors(
    recipe: Recipe, prompts: Sequence[Prompt], *, has_own: bool | None = False
) -> list[UserError]:
    """Errors of the keys, of the prompts' sources, and of two rewards of each function on its first row.

    has_own: the environment of episodes gives rewards itself, in place of the functions; None: an agent may.
    The functions run in worker processes, as in the run, so that a function that hangs is stopped at its time limit.
    """
    reward = recipe.reward
    has_episodes = recipe.episode is not None
    errors = key_errors(reward, has_own=has_own) + _source_errors(reward, prompts)
    for source in reward_specs(reward, recipe.run.timeout_s):
        first = next(
            (prompt for prompt in prompts if source_of(reward, prompt.row) == source), None
        )
        errors += _function_errors(
            _only(reward, source), recipe.run.timeout_s, first, has_episodes=has_episodes
        )
    return errors


def key_errors(reward: RewardConfig, *, has_own: bool | None) -> list[UserError]:
    """What the keys alone say. has_own: as of `reward_errors`."""
    errors = []
    if has_own and (reward.function or reward.by_source):
        hint = "set it to null, or take the method `reward` out of the environment"
        if reward.function:
            where = WHERE
        else:
            where = "reward.by_source"
        errors.append(
            UserError(where, "is set, and episode.environment gives the rewards itself", hint)
        )
    if reward.function is None and not reward.by_source and has_own is False:
        hint = "name a function, functions in reward.by_source, or give the environment a method `reward`"
        errors.append(UserError(WHERE, "is not set, and nothing else gives rewards", hint))
    if reward.function is None and reward.arguments:
        hint = "name it, or give arguments in reward.by_source"
        errors.append(
            UserError("reward.arguments", "are set, and there is no reward.function", hint)
        )
    if reward.penalty and reward.on_failure != "penalise":
        problem = f"{reward.penalty} is set, and reward.on_failure is {reward.on_failure}"
        errors.append(
            UserError(
                "reward.penalty", problem, "leave it out, or set reward.on_failure to penalise"
            )
        )
    return errors


def _source_errors(reward: RewardConfig, prompts: Sequence[Prompt]) -> list[UserError]:
    """Rows whose source has no reward function, where there is none for all other rows either."""
    if reward.function is not None or not reward.by_source:
        return []
    unknown = [prompt for prompt in prompts if source_of(reward, prompt.row) == DEFAULT]
    if not unknown:
        return []
    first = unknown[0]
    if reward.source in first.row:
        value = f"{first.row[reward.source]!r}"
    else:
        value = "not there"
    if len(unknown) > 1:
        more = f" (and {len(unknown) - 1} more such rows)"
    else:
        more = ""
    problem = (
        f"{first.id}: {reward.source!r} is {value}{more}, which reward.by_source does not name"
    )
    return [
        UserError(
            "reward.by_source", problem, "name it there, or a reward.function for all other rows"
        )
    ]


def _only(reward: RewardConfig, source: str) -> RewardConfig:
    """The recipe's branch with the function of one source only, and one worker."""
    if source == DEFAULT:
        return reward.model_copy(update={"by_source": {}, "workers": 1})
    own = {source: reward.by_source[source]}
    return reward.model_copy(update={"function": None, "by_source": own, "workers": 1})


def _own_errors(spec: RewardSpec) -> list[UserError]:
    """Errors of megarl's own functions that start programs or call services, which have their own time limits."""
    given = spec.arguments
    errors = []
    if spec.function == _CODE:
        url = given.get("url")
        if url:
            errors = url_errors(url, spec.where)
        else:
            unsafe = given.get("unsafe", False)
            errors = sandbox_errors(spec.where, unsafe=unsafe, hint=SANDBOX_HINT)
    if spec.function not in _BOUNDS:
        return errors
    key, usual_s = _BOUNDS[spec.function]
    needed_s = given.get(key, usual_s)
    if isinstance(needed_s, int | float) and needed_s + _SPARE_S > spec.timeout_s:
        problem = f"{spec.timeout_s:g} is too little beside the {needed_s:g} s that {key} gives {spec.function}"
        hint = f"set it to {needed_s + _SPARE_S:g}, or {key} in its arguments lower"
        errors.append(UserError("reward.timeout_s", problem, hint))
    return errors


def _episode(response: str) -> dict[str, Any]:
    """An episode in which the model called nothing and gave this response."""
    turn: TranscriptEntry = {"role": "assistant", "text": response, "calls": [], "reward": 0.0}
    return episode_dict(EpisodeFacts(1, 0, 0, 0.0, "answered", 0), [turn])


def _function_errors(
    reward: RewardConfig, start_s: float, first: Prompt | None, *, has_episodes: bool
) -> list[UserError]:
    """The function must exist, and score a right and an empty response to the first of its rows.

    has_episodes: the responses are episodes of one turn.
    """
    try:
        judges = RewardWorkers(reward, start_s)
    except UserError as error:
        return [error]
    try:
        answer = first.answer if first else ""
        place = first.id if first else ""
        responses = [answer, ""] if first else []
        if has_episodes:
            episodes = [_episode(response) for response in responses]
        else:
            episodes = []
        if first:
            found = judges.wait_for_rewards(answer, first.row, responses, episodes)
        else:
            found = []
    except UserError as error:
        return [error]
    finally:
        judges.shutdown()
    (spec,) = reward_specs(reward, start_s).values()
    own = _own_errors(spec)
    if own:
        return own
    for reward_result, response in zip(found, responses, strict=True):
        if isinstance(reward_result, Failure):
            return [
                UserError(
                    spec.where,
                    describe_failure(reward_result, response, answer, place),
                    REWARD_HINT,
                )
            ]
    return []
