"""Errors of a recipe's rewards: contradictory keys, rows without a reward function, functions that fail."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import Recipe, RewardConfig
from megarl.isolation.http_service import url_errors
from megarl.isolation.sandbox import sandbox_errors
from megarl.rollout.reward_workers.by_source import DEFAULT, RewardWorkers, reward_specs, scored_as
from megarl.rollout.reward_workers.reward_process import RewardSpec
from megarl.rollout.rewards import SANDBOX_HINT, WHERE, describe_failure
from megarl.types import EpisodeFacts, Prompt, TranscriptEntry, UserError, episode_dict
from megarl.types.json_objects import JsonObject
from megarl.types.listed import ErrorIterator, listed
from megarl.types.reward_result import REWARD_HINT, Failure

_CODE = "megarl.rollout.rewards.code:score"
# The argument that limits the time of a reward, and its default.
_BOUNDS = {_CODE: ("total_s", 30.0), "megarl.rollout.rewards.llm_judge:score": ("timeout_s", 60.0)}
_SPARE_S = 5.0  # for the reward's start and end


@listed
def reward_errors(
    recipe: Recipe, prompts: Sequence[Prompt], *, has_own: bool | None = False
) -> ErrorIterator:
    """Errors of the keys, of the prompts' sources, and of two rewards of each function on its first row.

    has_own: the environment of episodes gives rewards itself, in place of the functions; None: an agent may.
    The functions run in worker processes, as in the run, so that a function that hangs is stopped at its time limit.
    """
    reward = recipe.reward
    yield from key_errors(reward, has_own=has_own)
    yield from _source_errors(reward, prompts)
    for source in reward_specs(reward, recipe.run.timeout_s):
        first = next(
            (prompt for prompt in prompts if scored_as(reward, prompt.row) == source), None
        )
        yield from _function_errors(
            _only(reward, source),
            recipe.run.timeout_s,
            first,
            has_episodes=recipe.episode is not None,
        )


@listed
def key_errors(reward: RewardConfig, *, has_own: bool | None) -> ErrorIterator:
    """What the keys alone say. has_own: as of `reward_errors`."""
    if has_own and (reward.function or reward.by_source):
        yield UserError(
            WHERE if reward.function else "reward.by_source",
            "is set, and episode.environment gives the rewards itself",
            "set it to null, or take the method `reward` out of the environment",
        )
    if reward.function is None and not reward.by_source and has_own is False:
        yield UserError(
            WHERE,
            "is not set, and nothing else gives rewards",
            "name a function, functions in reward.by_source, or give the environment a method `reward`",
        )
    if reward.function is None and reward.arguments:
        yield UserError(
            "reward.arguments",
            "are set, and there is no reward.function",
            "name it, or give arguments in reward.by_source",
        )
    if reward.penalty and reward.on_failure != "penalise":
        yield UserError(
            "reward.penalty",
            f"{reward.penalty} is set, and reward.on_failure is {reward.on_failure}",
            "leave it out, or set reward.on_failure to penalise",
        )


def _source_errors(reward: RewardConfig, prompts: Sequence[Prompt]) -> ErrorIterator:
    """Rows whose source has no reward function, where there is none for all other rows either."""
    if reward.function is not None or not reward.by_source:
        return
    unknown = [prompt for prompt in prompts if scored_as(reward, prompt.row) == DEFAULT]
    if not unknown:
        return
    first = unknown[0]
    if reward.source in first.row:
        value = repr(first.row[reward.source])
    else:
        value = "not there"
    if len(unknown) > 1:
        value += f" (and {len(unknown) - 1} more such rows)"
    yield UserError(
        "reward.by_source",
        f"{first.id}: {reward.source!r} is {value}, which reward.by_source does not name",
        "name it there, or a reward.function for all other rows",
    )


def _only(reward: RewardConfig, source: str) -> RewardConfig:
    """The recipe's branch with the function of one source only, and one worker."""
    if source == DEFAULT:
        return reward.model_copy(update={"by_source": {}, "workers": 1})
    by_source = {source: reward.by_source[source]}
    return reward.model_copy(update={"function": None, "by_source": by_source, "workers": 1})


@listed
def _own_errors(spec: RewardSpec) -> ErrorIterator:
    """Errors of megarl's own functions that start programs or call services, which have their own time limits."""
    arguments = spec.arguments
    if spec.function == _CODE:
        if url := arguments.get("url"):
            yield from url_errors(url, spec.where)
        else:
            unsafe = arguments.get("unsafe", False)
            yield from sandbox_errors(spec.where, unsafe=unsafe, hint=SANDBOX_HINT)
    if spec.function not in _BOUNDS:
        return
    key, usual_s = _BOUNDS[spec.function]
    needed_s = arguments.get(key, usual_s)
    if isinstance(needed_s, int | float) and needed_s + _SPARE_S > spec.timeout_s:
        yield UserError(
            "reward.timeout_s",
            f"{spec.timeout_s:g} is too little beside the {needed_s:g} s that {key} gives {spec.function}",
            f"set it to {needed_s + _SPARE_S:g}, or {key} in its arguments lower",
        )


def _episode(response: str) -> JsonObject:
    """An episode in which the model called nothing and gave this response."""
    turn: TranscriptEntry = {"role": "assistant", "text": response, "calls": [], "reward": 0.0}
    return episode_dict(EpisodeFacts(1, 0, 0, 0.0, "answered", 0), [turn])


def _function_errors(
    reward: RewardConfig, start_s: float, first: Prompt | None, *, has_episodes: bool
) -> list[UserError]:
    """The function must exist, and score a right and an empty response to the first of its rows.

    has_episodes: the responses are episodes of one turn.
    """
    failures = []
    try:
        workers = RewardWorkers(reward, start_s)
        try:
            if first:
                failures = _failures(workers, first, has_episodes=has_episodes)
        finally:
            workers.shutdown()
    except UserError as error:
        return [error]
    (spec,) = reward_specs(reward, start_s).values()
    return _own_errors(spec) or [
        UserError(spec.where, failure, REWARD_HINT) for failure in failures[:1]
    ]


def _failures(workers: RewardWorkers, prompt: Prompt, *, has_episodes: bool) -> list[str]:
    """What was wrong with the rewards of the prompt's answer and of an empty response, as sentences."""
    responses = [prompt.answer, ""]
    if has_episodes:
        episodes = [_episode(response) for response in responses]
    else:
        episodes = []
    results = workers.wait_for_rewards(prompt.answer, prompt.row, responses, episodes)
    return [
        describe_failure(result, response, prompt.answer, prompt.id)
        for result, response in zip(results, responses, strict=True)
        if isinstance(result, Failure)
    ]
