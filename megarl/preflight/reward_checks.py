"""Faults of a recipe's rewards: contradictory keys, rows without a reward function, functions that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Recipe, RewardConfig
from megarl.isolation.http_service import url_faults
from megarl.isolation.sandbox import sandbox_faults
from megarl.rollout.reward_workers.by_source import DEFAULT, Scorers, reward_specs, source_of
from megarl.rollout.reward_workers.reward_process import RewardSpec
from megarl.rollout.rewards import WHERE, describe_failure
from megarl.types import EpisodeFacts, Prompt, TranscriptEntry, UserFault, episode_dict
from megarl.types.reward_result import MEND, Failure

_CODE = "megarl.rollout.rewards.code:score"
# The argument that limits the time of a verdict, and its default.
_BOUNDS = {_CODE: ("total_s", 30.0), "megarl.rollout.rewards.llm_judge:score": ("timeout_s", 60.0)}
_SPARE_S = 5.0  # for the verdict's start and end


def reward_faults(recipe: Recipe, prompts: Sequence[Prompt], *, has_own: bool | None = False) -> list[UserFault]:
    """Faults of the keys, of the prompts' sources, and of two verdicts of each function on its first row.

    has_own: the environment of episodes gives rewards itself, in place of the functions; None: an agent may.
    The functions run in worker processes, as in the run, so that a function that hangs is stopped at its time limit.
    """
    reward, has_episodes = recipe.reward, recipe.episode is not None
    faults = key_faults(reward, has_own=has_own) + _source_faults(reward, prompts)
    for source in reward_specs(reward, recipe.run.timeout_s):
        first = next((prompt for prompt in prompts if source_of(reward, prompt.row) == source), None)
        faults += _function_faults(_only(reward, source), recipe.run.timeout_s, first, has_episodes=has_episodes)
    return faults


def key_faults(reward: RewardConfig, *, has_own: bool | None) -> list[UserFault]:
    """What the keys alone say. has_own: as of `reward_faults`."""
    faults = []
    if has_own and (reward.function or reward.by_source):
        mend = "set it to null, or take the method `reward` out of the environment"
        where = WHERE if reward.function else "reward.by_source"
        faults.append(UserFault(where, "is set, and episode.environment gives the rewards itself", mend))
    if reward.function is None and not reward.by_source and has_own is False:
        mend = "name a function, functions in reward.by_source, or give the environment a method `reward`"
        faults.append(UserFault(WHERE, "is not set, and nothing else gives rewards", mend))
    if reward.function is None and reward.arguments:
        mend = "name it, or give arguments in reward.by_source"
        faults.append(UserFault("reward.arguments", "are set, and there is no reward.function", mend))
    if reward.penalty and reward.on_failure != "penalise":
        problem = f"{reward.penalty} is set, and reward.on_failure is {reward.on_failure}"
        faults.append(UserFault("reward.penalty", problem, "leave it out, or set reward.on_failure to penalise"))
    return faults


def _source_faults(reward: RewardConfig, prompts: Sequence[Prompt]) -> list[UserFault]:
    """Rows whose source has no reward function, where there is none for all other rows either."""
    if reward.function is not None or not reward.by_source:
        return []
    unknown = [prompt for prompt in prompts if source_of(reward, prompt.row) == DEFAULT]
    if not unknown:
        return []
    first = unknown[0]
    value = f"{first.row[reward.source]!r}" if reward.source in first.row else "not there"
    more = f" (and {len(unknown) - 1} more such rows)" if len(unknown) > 1 else ""
    problem = f"{first.id}: {reward.source!r} is {value}{more}, which reward.by_source does not name"
    return [UserFault("reward.by_source", problem, "name it there, or a reward.function for all other rows")]


def _only(reward: RewardConfig, source: str) -> RewardConfig:
    """The recipe's branch with the function of one source only, and one worker."""
    if source == DEFAULT:
        return reward.model_copy(update={"by_source": {}, "workers": 1})
    own = {source: reward.by_source[source]}
    return reward.model_copy(update={"function": None, "by_source": own, "workers": 1})


def _own_faults(spec: RewardSpec) -> list[UserFault]:
    """Faults of megarl's own functions that start programs or call services, which have their own time limits."""
    given, faults = spec.arguments, []
    if spec.function == _CODE:
        url = given.get("url")
        faults = url_faults(url) if url else sandbox_faults(unsafe=given.get("unsafe", False))
        faults = [UserFault(spec.where, fault.problem, fault.mend) for fault in faults]
    if spec.function not in _BOUNDS:
        return faults
    key, usual_s = _BOUNDS[spec.function]
    needed_s = given.get(key, usual_s)
    if isinstance(needed_s, int | float) and needed_s + _SPARE_S > spec.timeout_s:
        problem = f"{spec.timeout_s:g} is too little beside the {needed_s:g} s that {key} gives {spec.function}"
        mend = f"set it to {needed_s + _SPARE_S:g}, or {key} in its arguments lower"
        faults.append(UserFault("reward.timeout_s", problem, mend))
    return faults


def _episode(response: str) -> dict[str, Any]:
    """An episode in which the model called nothing and gave this response."""
    turn: TranscriptEntry = {"role": "assistant", "text": response, "calls": [], "reward": 0.0}
    return episode_dict(EpisodeFacts(1, 0, 0, 0.0, "answered", 0), [turn])


def _function_faults(
    reward: RewardConfig, start_s: float, first: Prompt | None, *, has_episodes: bool
) -> list[UserFault]:
    """The function must exist, and score a right and an empty response to the first of its rows.

    has_episodes: the responses are episodes of one turn.
    """
    try:
        judges = Scorers(reward, start_s)
    except UserFault as fault:
        return [fault]
    try:
        answer = first.answer if first else ""
        place = first.id if first else ""
        responses = [answer, ""] if first else []
        episodes = [_episode(response) for response in responses] if has_episodes else []
        found = judges.wait_for_verdicts(answer, first.row, responses, episodes) if first else []
    except UserFault as fault:
        return [fault]
    finally:
        judges.shutdown()
    (spec,) = reward_specs(reward, start_s).values()
    own = _own_faults(spec)
    if own:
        return own
    for verdict, response in zip(found, responses, strict=True):
        if isinstance(verdict, Failure):
            return [UserFault(spec.where, describe_failure(verdict, response, answer, place), MEND)]
    return []
