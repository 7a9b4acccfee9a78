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
_LONGEST_ANSWER = 1000  # of two that begin so long alike nobody asks whether they are the same


@dataclass(frozen=True)
class Verdict:
    """What a response is worth, and whether it counts as correct in the accuracy.

    answer: what it says, for the vote of an evaluation's maj@k; "" if it says nothing, None: the response as it is.
    """

    reward: float
    correct: bool
    answer: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why there is no verdict, in a few words."""

    words: str


# (response, answer, row) -> a verdict or a number, of which 1 and more is correct; or, `async def`, a promise of it.
Reward = Callable[[str, str, Mapping[str, Any]], Any]


def load_reward(path: str, arguments: Mapping[str, Any], where: str = WHERE) -> Reward:
    """The function at `module:function`, with its keyword arguments. Raises UserFault when there is none such.

    where: the recipe key that names it.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserFault(where, f"{path!r} is not module:function", _FORM)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a user's module raises whatever it likes while it is imported
        raise UserFault(where, f"{module_name} cannot be imported ({said(error)})", "mend or install it") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserFault(where, f"{module_name} has no {name!r}", _FORM)
    if not callable(function):
        raise UserFault(where, f"{path} is a {type(function).__name__}, not a function", _FORM)
    try:
        inspect.signature(function).bind("response", "answer", {}, **arguments)
    except TypeError as error:
        call = ", ".join(["response", "answer", "row", *(f"{key}=..." for key in arguments)])
        key = f"{where.rpartition('.')[0]}.arguments"
        mend = f"make {key} those that it takes, after response, answer and row"
        raise UserFault(where, f"{path} cannot be called with ({call}): {error}", mend) from None
    except ValueError:  # one that is written in C may not say what it takes
        pass
    return partial(function, **arguments) if arguments else function


def verdict_of(result: Any) -> Verdict | Failure:
    """What a function returned, as a verdict; a failure if it is no number that a float32 holds."""
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


def told(failure: Failure, response: str, answer: str) -> str:
    """A failure with what it befell."""
    return f"{failure.words} on response {short(response)}, answer {short(answer)}"


def short(value: object, longest: int = 80) -> str:
    """As Python writes it, cut where it is long."""
    text = repr(value[: 2 * longest] if isinstance(value, str) else value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def said(error: BaseException) -> str:
    """An exception in a line."""
    try:
        words = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # its own words raise
        words = type(error).__name__
    return words if len(words) <= _LONGEST_WORDS else f"{words[: _LONGEST_WORDS - 3]}..."
