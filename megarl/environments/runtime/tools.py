"""A typed function as a tool: its schema for the model, and the check of the arguments that the model writes."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning

from megarl.printable import describe_error, short
from megarl.types import UserError

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_ENTRY = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_MOST_ERRORS = 3  # told of one call
# keys of a JSON schema whose values are no schemas
_VERBATIM = ("default", "const", "enum", "examples")


class BadArguments(Exception):
    """The arguments of a call do not fit; its text is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function that the model calls. schema: in the form of OpenAI's `tools`; fields: argument -> name in `model`."""

    name: str
    function: Callable[..., Any]  # of an environment's class: takes the instance first
    bound: Mapping[str, Any]  # arguments from the recipe
    is_async: bool
    schema: Mapping[str, Any]
    model: type[BaseModel]
    fields: Mapping[str, str]

    def values(self, arguments: object) -> dict[str, Any]:
        """The arguments as the function's types, without conversions. Raises BadArguments, a sentence.

        An argument that is left out is not in the result: the function's own default holds.
        """
        if not isinstance(arguments, Mapping):
            raise BadArguments(f"{self.name} was not called: its arguments are not a JSON object.")
        try:
            found = self.model.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            errors = [
                _error(one["type"], one["loc"], one["msg"], one["input"]) for one in error.errors()
            ]
            if len(errors) > _MOST_ERRORS:
                more = f" and {len(errors) - _MOST_ERRORS} more"
            else:
                more = ""
            told = "; ".join(errors[:_MOST_ERRORS])
            raise BadArguments(f"{self.name} was not called: {told}{more}.") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"{self.name} was not called: {describe_error(error)}.") from None
        given = {
            name: getattr(found, field)
            for name, field in self.fields.items()
            if field in found.model_fields_set
        }
        return {**self.bound, **given}


def make_tool(
    function: Callable[..., Any],
    name: str,
    where: str,
    path: str,
    *,
    arguments: Mapping[str, Any],
    is_method: bool,
) -> Tool:
    """The tool that a function is. path: its name in messages; arguments: the recipe's, bound where it takes them.

    Arguments that only have a keyword (after `*`) are the recipe's too, and the model does not see them. Raises
    UserError(where) when it is not typed, documented, or callable with what JSON can hold.
    """
    if not _NAME.fullmatch(name):
        problem = f"{path} has a name that no model can call"
        raise UserError(where, problem, "use ASCII letters, digits and _")
    description, told = _described(_docstring(function, path, where))
    hints = _hints(function, path, where)
    known = inspect.signature(function).parameters
    fields: dict[str, tuple[Any, Any]] = {}
    names: dict[str, str] = {}
    for parameter in _parameters(function, path, where, skip=is_method):
        if parameter.name in arguments:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            _check_default(parameter, path, where)
            continue
        if parameter.name not in hints:
            problem = f"the argument {parameter.name!r} of {path} has no type"
            raise UserError(where, problem, "annotate it, for example `expression: str`")
        if parameter.default is parameter.empty:
            default = ...
        else:
            default = parameter.default
        # of a model's own names none can be in the way
        names[parameter.name] = field = f"argument_{len(names)}"
        fields[field] = (
            hints[parameter.name],
            _field(default, parameter.name, told.pop(parameter.name, None)),
        )
    unknown = [key for key in told if key not in known]
    if unknown:
        problem = f"the docstring of {path} describes {unknown[0]!r}, which is no argument of it"
        raise UserError(where, problem, "correct the section `Args:`")
    model, parameters = _model(name, fields, path, where)
    schema = {"name": name, "description": description, "parameters": parameters}
    bound = {key: value for key, value in arguments.items() if key in known}
    is_async = inspect.iscoroutinefunction(function)
    return Tool(
        name, function, bound, is_async, {"type": "function", "function": schema}, model, names
    )


def _docstring(function: Callable[..., Any], path: str, where: str) -> str:
    text = inspect.getdoc(function) if function.__doc__ else ""
    if not (text and text.strip()):
        hint = "say in one what it does: it is what the model reads"
        raise UserError(where, f"{path} has no docstring", hint)
    return text


def _hints(function: Callable[..., Any], path: str, where: str) -> Mapping[str, Any]:
    """The types of a function's arguments, with what `Annotated` says of them."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        problem = f"the annotations of {path} cannot be read ({describe_error(error)})"
        raise UserError(where, problem, "import the types in its module") from None


def _parameters(
    function: Callable[..., Any], path: str, where: str, *, skip: bool
) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            where, f"{path} has no signature", "write a Python function around it"
        ) from None
    found = found[1:] if skip else found
    for one in found:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
            problem = f"{path} takes {stars}{one.name}, which a model cannot name"
            raise UserError(where, problem, "name its arguments, and no / before them")
    return found


def _check_default(parameter: inspect.Parameter, path: str, where: str) -> None:
    if parameter.default is parameter.empty:
        hint = f"write {parameter.name!r} into episode.arguments, or give it a default"
        raise UserError(where, f"{path} needs {parameter.name!r}, which only has a keyword", hint)


def _field(default: Any, alias: str, description: str | None) -> FieldInfo:
    # None would hide an annotation's
    own: dict[str, Any] = {} if description is None else {"description": description}
    return Field(default, alias=alias, **own)


def _model(
    name: str, fields: Mapping[str, Any], path: str, where: str
) -> tuple[type[BaseModel], dict[str, Any]]:
    """The model of a tool's arguments and their JSON schema."""
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PydanticJsonSchemaWarning)  # of a default
            schema = model.model_json_schema()
        json.dumps(schema, allow_nan=False)
    except (PydanticUserError, PydanticJsonSchemaWarning, TypeError, ValueError) as error:
        reason = describe_error(error).partition(" For further information")[0]
        problem = f"an argument of {path} has a type or a default that JSON cannot hold ({reason})"
        raise UserError(
            where, problem, "use str, int, float, bool, Literal, list, dict or dataclasses"
        ) from None
    parameters = _untitled(schema)
    # the templates of models show what transformers makes of a function
    parameters.pop("additionalProperties", None)
    parameters.pop("description", None)
    return model, {"type": "object", "properties": {}, **parameters}


def _untitled(schema: Any, *, is_map: bool = False) -> Any:
    """A JSON schema without pydantic's titles. is_map: of names to schemas, which may be called title."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in _VERBATIM and not is_map
        else _untitled(value, is_map=_is_map(key) and not is_map)
        for key, value in schema.items()
        if is_map or key != "title"
    }


def _is_map(key: str) -> bool:
    return key in ("properties", "$defs", "patternProperties")


def _described(text: str) -> tuple[str, dict[str, str]]:
    """A docstring without its section `Args:` (Google's form), and what that says of each argument."""
    head = []
    told = {}
    lines = iter(text.strip().splitlines())
    for line in lines:
        if line.strip() in ("Args:", "Arguments:"):
            break
        head.append(line)
    indent = ""
    name = ""
    for line in lines:
        own = line[: len(line) - len(line.lstrip())]
        if line.strip() and not own:
            return "\n".join(["\n".join(head).strip(), "", line, *lines]).strip(), told
        entry = _ENTRY.fullmatch(line)
        indent = indent or own
        if entry and own == indent:
            name = entry[1]
            told[name] = entry[2].strip()
        elif name and line.strip():
            told[name] = f"{told[name]} {line.strip()}".strip()
    return "\n".join(head).strip(), told


def _error(kind: str, place: Sequence[int | str], message: str, value: object) -> str:
    """What is wrong with an argument, as a part of a sentence."""
    name = ".".join(map(str, place))
    if kind == "missing":
        return f"the argument {name!r} is missing"
    if kind == "extra_forbidden":
        return f"there is no argument {name!r}"
    if kind == "json_invalid":  # nested too deeply, or text that UTF-8 cannot hold
        return f"its arguments are {message[:1].lower()}{message[1:]}"
    return f"the argument {name!r} is {short(value)}, and {message[:1].lower()}{message[1:]}"
