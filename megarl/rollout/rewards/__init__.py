"""Rewards: a function of a response, its answer and the data row, named in the recipe as `module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite  # not the module: a room of ours has its name
from numbers import Real
from typing import Any

from megarl.types import UserFault

WHERE = "reward.function"
MEND = "make it return a finite number for every response"
_FORM = "write module:function, for example megarl.rollout.rewards.exact:score"
LARGEST = 3.4e38  # rewards are float32
_LONGEST_WORDS = 300
_LONGEST_ANSWER = 1000  # characters; longer answers that begin alike count as one in the vote


@dataclass(frozen=True)
class Verdict:
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


# (response, answer, row) -> a verdict or a number, of which 1 and more is correct; or, `async def`, a coroutine of it.
# A function with the parameter `episode` gets that keyword, too: an `episode_dict`, or None where it is no episode.
Reward = Callable[..., Any]
EPISODE = "episode"


def load_object(path: str, where: str, form: str = "module:function", mend: str = _FORM) -> Any:
    """What a path names. Raises UserFault(where) when there is no such thing, with `form` and `mend` as the words."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserFault(where, f"{path!r} is not {form}", mend)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a user's module may raise any exception while it is imported
        reason = describe_error(error)
        raise UserFault(where, f"{module_name} cannot be imported ({reason})", "correct or install it") from error
    found = getattr(module, name, None)
    if found is None:
        raise UserFault(where, f"{module_name} has no {name!r}", mend)
    return found


def load_reward(path: str, arguments: Mapping[str, Any], where: str = WHERE) -> Reward:
    """The function at `module:function`, with its keyword arguments. Raises UserFault when there is no such function.

    where: the recipe key that names it.
    """
    function = load_object(path, where)
    if not callable(function):
        raise UserFault(where, f"{path} is a {type(function).__name__}, not a function", _FORM)
    key, given = f"{where.rpartition('.')[0]}.arguments", {EPISODE: None} if takes_episode(function) else {}
    if given.keys() & arguments.keys():
        raise UserFault(key, f"{EPISODE!r} is megarl's own: {path} gets the episode in it", "give it another name")
    try:
        inspect.signature(function).bind("response", "answer", {}, **given, **arguments)
    except TypeError as error:
        call = ", ".join(["response", "answer", "row", *(f"{key}=..." for key in (*given, *arguments))])
        mend = f"write into {key} what it takes after response, answer and row"
        raise UserFault(where, f"{path} cannot be called with ({call}): {error}", mend) from None
    except ValueError:  # a function that is written in C may have no signature
        pass
    return partial(function, **arguments) if arguments else function


def takes_episode(function: Reward) -> bool:
    """Whether the function has a parameter `episode`."""
    try:
        return EPISODE in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is written in C
        return False


def verdict_of(result: Any) -> Verdict | Failure:
    """A function's return value as a verdict; a failure if it is not a number that a float32 holds."""
    value = result.reward if isinstance(result, Verdict) else result
    try:
        if not (isinstance(value, Real) and isfinite(value) and abs(float(value)) <= LARGEST):
            return Failure(f"returned {short(result)}")
        if not isinstance(result, Verdict):
            return Verdict(float(value), float(value) >= 1.0)
        answer = None if result.answer is None else str(result.answer)[:_LONGEST_ANSWER]
        return Verdict(float(value), bool(result.correct), answer)
    except OverflowError:  # an integer beyond all floats
        return Failure(f"returned a {type(value).__name__} that is no finite number")


def describe_failure(failure: Failure, response: str, answer: str, place: str) -> str:
    """A failure with the response and the answer that it concerns; place: the file and the row of the prompt."""
    return f"{failure.words} on response {short(response)} to {place}, answer {short(answer)}"


def short(value: object, longest: int = 80) -> str:
    """A value as Python writes it, cut to `longest` characters."""
    text = repr(value[: 2 * longest] if isinstance(value, str) else value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def describe_error(error: BaseException) -> str:
    """An exception as one line."""
    try:
        words = " ".join(f"{type(error).__name__}: {error}".split())
    except BaseException:  # its __str__ raises, perhaps KeyboardInterrupt, which would end a worker process
        words = type(error).__name__
    return words if len(words) <= _LONGEST_WORDS else f"{words[: _LONGEST_WORDS - 3]}..."
