"""Loads what a recipe names as `module:name` in a worker process, and calls its `prepare` once.

Used for all kinds of users' functions: rewards, tools, environments and agents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megarl.printable import describe_error
from megarl.types import UserError
from megarl.types.json_objects import CallArguments

# a user's function that is called once in each process, before its first episode
PREPARE = "prepare"


def prepare(loaded: object, arguments: CallArguments, where: str, path: str) -> None:
    """Call the `prepare` of what `path` names, if it has one. Raises UserError, as `prepare` itself may."""
    function = getattr(loaded, PREPARE, None)
    if function is None:
        return
    try:
        function(**arguments)
    except UserError:
        raise
    except BaseException as error:  # a user's function may raise any exception
        problem = f"{path} cannot be prepared ({describe_error(error)})"
        raise UserError(where, problem, "correct episode.arguments, or what it needs") from None


def kind_of(value: object) -> str:
    """The kind of a value as words for an error message: "the class Calculator", "a str"."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an `async def` function, a partial of it, or an object with such a call."""
    function = getattr(function, "func", function)  # of a partial
    call = getattr(type(function), "__call__", None)  # noqa: B004 - of an object that is called like a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
