"""Finds the agent that a recipe names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from megarl.isolation.function_loading import (
    is_coroutine_function,
    kind_of,
    prepare,
)
from megarl.types import UserError
from megarl.types.json_objects import CallArguments
from megarl.types.named_objects import load_object

AGENT = "episode.agent"
ARGUMENTS = "episode.arguments"
_EXAMPLE = "write module:name, for example my_agent:run"
_FORM = "write it as async def run(chat, row, ...)"

# (chat, row) -> a reward, a number, of which 1 and more is correct, or None: the agent gives no reward.
Agent = Callable[..., Coroutine[Any, Any, Any]]


def load_agent(path: str, arguments: CallArguments, *, prepares: bool = True) -> Agent:
    """The function at `path` with its keyword arguments. Raises UserError.

    prepares: whether what it has as `prepare` is called.
    """
    loaded = load_object(path, AGENT, "module:name", _EXAMPLE)
    if not callable(loaded) or inspect.isclass(loaded):
        raise UserError(AGENT, f"{path} is {kind_of(loaded)}, not an async def function", _FORM)
    if not is_coroutine_function(loaded):
        raise UserError(AGENT, f"{path} is not an async def function that returns a value", _FORM)
    agent = cast(Agent, loaded)
    _check_call(agent, path, arguments)
    if prepares:
        prepare(agent, arguments, AGENT, path)
    return partial(agent, **arguments)


def _check_call(agent: Agent, path: str, arguments: CallArguments) -> None:
    signature = inspect.signature(agent)
    try:
        signature.bind_partial(None, {})
    except TypeError as error:
        raise UserError(
            AGENT, f"{path} cannot be called with (chat, row): {error}", _FORM
        ) from None
    try:
        signature.bind(None, {}, **arguments)
    except TypeError as error:
        problem = f"{path} cannot be called with them: {error}"
        raise UserError(ARGUMENTS, problem, "write what it takes after chat and row") from None
