"""Rewards: a function of a response, its answer and the data row, named in the recipe as `module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megarl.isolation.service import Service as Service
from megarl.isolation.service import ServiceError as ServiceError
from megarl.isolation.service import TryAgain as TryAgain
from megarl.isolation.service import Unavailable as Unavailable
from megarl.printable import short
from megarl.types import UserError
from megarl.types.json_objects import CallArguments
from megarl.types.named_objects import load_object
from megarl.types.reward_result import Failure as Failure
from megarl.types.reward_result import RewardResult as RewardResult

WHERE = "reward.function"
SANDBOX_HINT = "install bubblewrap, name a remote sandbox with `url`, or run without isolation with `unsafe: true`"
_FORM = "write module:function, for example megarl.rollout.rewards.exact:score"


# (response, answer, row) -> a verdict or a number, of which 1 and more is correct; or, `async def`, a coroutine of it.
# A function with the parameter `episode` gets that keyword, too: an `episode_dict`, or None where it is no episode.
Reward = Callable[..., Any]
EPISODE = "episode"


def load_reward(path: str, arguments: CallArguments, where: str = WHERE) -> Reward:
    """The function at `module:function`, with its keyword arguments. Raises UserError when there is no such function.

    where: the recipe key that names it.
    """
    function = load_object(path, where, "module:function", _FORM)
    if not callable(function):
        raise UserError(where, f"{path} is a {type(function).__name__}, not a function", _FORM)
    key = f"{where.rpartition('.')[0]}.arguments"
    keywords = dict(arguments)
    if takes_episode(function):
        if EPISODE in arguments:
            problem = f"{EPISODE!r} is megarl's own: {path} gets the episode in it"
            raise UserError(key, problem, "give it another name")
        keywords = {EPISODE: None, **arguments}
    try:
        inspect.signature(function).bind("response", "answer", {}, **keywords)
    except TypeError as error:
        call = ", ".join(["response", "answer", "row", *(f"{name}=..." for name in keywords)])
        hint = f"write into {key} what it takes after response, answer and row"
        raise UserError(where, f"{path} cannot be called with ({call}): {error}", hint) from None
    except ValueError:  # a function that is written in C may have no signature
        pass
    return partial(function, **arguments) if arguments else function


def takes_episode(function: Reward) -> bool:
    """Whether the function has a parameter `episode`."""
    try:
        return EPISODE in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is written in C
        return False


def describe_failure(failure: Failure, response: str, answer: str, place: str) -> str:
    """A failure with the response and the answer that it concerns; place: the file and the row of the prompt."""
    return f"{failure.words} on response {short(response)} to {place}, answer {short(answer)}"
