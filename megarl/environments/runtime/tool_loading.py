"""Finds the tools or the environment that a recipe names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.environments.runtime.environment import Environment
from megarl.environments.runtime.tools import Tool, make_tool
from megarl.isolation.function_loading import PREPARE, kind_of, prepare
from megarl.types import UserError
from megarl.types.json_objects import CallArguments
from megarl.types.named_objects import load_object

TOOLS = "episode.tools"
ENVIRONMENT = "episode.environment"
ARGUMENTS = "episode.arguments"
_FORM = "module:name"
_EXAMPLE = "write module:name, for example megarl.environments.{}"
# name -> its parameters
_RESERVED = {"reset": ["row"], "reply": ["text"], "reward": [], "close": []}


@dataclass(frozen=True)
class Toolbox:
    """What episodes are given: tools, or an environment's class with its methods as tools.

    has: the reserved methods that the class defines itself; is_async: those of them that are `async def`.
    """

    tools: Mapping[str, Tool]
    environment: type[Environment] | None = None
    arguments: CallArguments | None = None
    has: frozenset[str] = frozenset()
    is_async: frozenset[str] = frozenset()

    def make(self, seed: int) -> Environment:
        """A new instance of the environment."""
        assert self.environment
        instance = self.environment.__new__(self.environment)
        instance.seed = seed
        instance.__init__(**(self.arguments or {}))
        return instance


def load_tools(paths: Sequence[str], arguments: CallArguments, *, prepares: bool = True) -> Toolbox:
    """The functions at `paths`, each with those of the arguments that it takes. Raises UserError.

    prepares: whether what they have as `prepare` is called.
    """
    tools: dict[str, Tool] = {}
    taken: set[str] = set()
    for path in paths:
        function = load_object(path, TOOLS, _FORM, _EXAMPLE.format("calculator:calculate"))
        if not inspect.isroutine(function):
            problem = f"{path} is {kind_of(function)}, not a function"
            raise UserError(TOOLS, problem, "name a function with def or async def")
        name = path.rpartition(":")[2]
        if name in tools:
            raise UserError(
                TOOLS, f"two tools have the name {name!r}", "give one of them another name"
            )
        tools[name] = make_tool(function, name, TOOLS, path, arguments=arguments, is_method=False)
        taken |= tools[name].bound.keys()
        if prepares:
            prepare(function, tools[name].bound, TOOLS, path)
    if not tools:
        raise UserError(TOOLS, "no tool is named", _EXAMPLE.format("calculator:calculate"))
    if unknown := sorted(arguments.keys() - taken):
        raise UserError(
            ARGUMENTS, f"no tool takes {unknown[0]!r}", "leave it out, or correct its name"
        )
    return Toolbox(tools)


def load_environment(path: str, arguments: CallArguments, *, prepares: bool = True) -> Toolbox:
    """The class at `path`, its public methods as tools; prepares: as of `load_tools`. Raises UserError."""
    environment_class = load_object(path, ENVIRONMENT, _FORM, _EXAMPLE.format("guess:Guess"))
    if not (inspect.isclass(environment_class) and issubclass(environment_class, Environment)):
        problem = f"{path} is {kind_of(environment_class)}, not a subclass of megarl.environments.Environment"
        raise UserError(ENVIRONMENT, problem, "let it inherit from Environment")
    _check_call(environment_class, path, arguments)
    # the base Environment, the first of them, is left out
    _, *classes = (
        base for base in reversed(environment_class.__mro__) if issubclass(base, Environment)
    )
    names = dict.fromkeys(name for base in classes for name in vars(base))
    has = frozenset(_RESERVED & names.keys())
    for name in has:
        _check_reserved(getattr(environment_class, name), name, path)
    tools = {
        name: _method_tool(environment_class, name, path)
        for name in names
        if not name.startswith("_")
        and name not in (*_RESERVED, PREPARE)
        and inspect.isroutine(getattr(environment_class, name))
    }
    if not tools and "reply" not in has:
        problem = f"{path} has neither a tool nor `reply`"
        raise UserError(
            ENVIRONMENT, problem, "define a public method with a docstring, or reply(text)"
        )
    if prepares:
        prepare(environment_class, arguments, ENVIRONMENT, path)
    is_async = frozenset(
        name for name in has if inspect.iscoroutinefunction(getattr(environment_class, name))
    )
    return Toolbox(tools, environment_class, dict(arguments), has, is_async)


def _method_tool(environment: type[Environment], name: str, path: str) -> Tool:
    raw = inspect.getattr_static(environment, name)
    function: Callable[..., Any] = getattr(environment, name)
    if isinstance(raw, staticmethod | classmethod):
        problem = f"{path}.{name} is a {type(raw).__name__}"
        raise UserError(
            ENVIRONMENT, problem, "make it a plain method, or begin its name with an underscore"
        )
    if not (function.__doc__ or "").strip():
        problem = f"the public method {name} of {path} has no docstring"
        hint = "say in one what it does if it is a tool, else begin its name with an underscore"
        raise UserError(ENVIRONMENT, problem, hint)
    return make_tool(function, name, ENVIRONMENT, f"{path}.{name}", arguments={}, is_method=True)


def _check_call(environment: type[Environment], path: str, arguments: CallArguments) -> None:
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        problem = f"{path} cannot be made with them: {error}"
        raise UserError(ARGUMENTS, problem, "write what its constructor takes") from None


def _check_reserved(method: Callable[..., Any], name: str, path: str) -> None:
    try:
        inspect.signature(method).bind(None, *_RESERVED[name])
    except TypeError as error:
        problem = f"{path}.{name} cannot be called ({error})"
        hint = f"write it as {name}({', '.join(['self', *_RESERVED[name]])})"
        raise UserError(ENVIRONMENT, problem, hint) from None
