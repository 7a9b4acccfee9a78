"""A typed function as a tool: its schema for the model, and the check of the arguments that the model writes."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning
from pydantic_core import ErrorDetails

from megarl.printable import describe_error, short
from megarl.types import UserError
from megarl.types.json_objects import CallArguments, ToolSchema

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_ENTRY = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_MOST_ERRORS = 3  # told of one call
# keys of a JSON schema whose values are no schemas
_VERBATIM = ("default", "const", "enum", "examples")
_MAPS = ("properties", "$defs", "patternProperties")  # of names to schemas


class BadArguments(Exception):
    """The arguments of a call do not fit; its text is for the model."""

    kind = "arguments"


@dataclass(frozen=True)
class Tool:
    """A function that the model calls. schema: in the form of OpenAI's `tools`; fields: argument -> name in `model`."""

    name: str
    function: Callable[..., Any]  # of an environment's class: takes the instance first
    bound: Mapping[str, Any]  # arguments from the recipe
    is_async: bool
    schema: ToolSchema
    model: type[BaseModel]
    fields: Mapping[str, str]

    def values(self, arguments: object) -> dict[str, Any]:
        """The arguments as the function's types, without conversions. Raises BadArguments, a sentence.

        An argument that is left out is not in the result: the function's own default holds.
        """
        if not isinstance(arguments, Mapping):
            raise BadArguments(f"{self.name} was not called: its arguments are not a JSON object.")
        try:
            checked = self.model.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            problems = _problems(error)
            raise BadArguments(f"{self.name} was not called: {problems}.") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"{self.name} was not called: {describe_error(error)}.") from None
        values_by_name = {
            name: getattr(checked, field)
            for name, field in self.fields.items()
            if field in checked.model_fields_set
        }
        return {**self.bound, **values_by_name}


def make_tool(
    function: Callable[..., Any],
    name: str,
    where: str,
    path: str,
    *,
    arguments: CallArguments,
    is_method: bool,
) -> Tool:
    """The tool that a function is. path: its name in messages; arguments: the recipe's, bound where it takes them.

    Arguments that only have a keyword (after `*`) are the recipe's too, and the model does not see them. Raises
    UserError(where) when it is not typed, documented, or callable with what JSON can hold.
    """
    if not _NAME.fullmatch(name):
        problem = f"{path} has a name that no model can call"
        raise UserError(where, problem, "use ASCII letters, digits and _")
    description, descriptions = _described(_docstring(function, path, where))
    hints = _hints(function, path, where)
    parameters = _parameters(function, path, where, skip=is_method)
    takes = inspect.signature(function).parameters
    argument_fields: dict[str, tuple[Any, FieldInfo]] = {}
    field_names: dict[str, str] = {}
    for parameter in parameters:
        if parameter.name in arguments:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                problem = f"{path} needs {parameter.name!r}, which only has a keyword"
                hint = f"write {parameter.name!r} into episode.arguments, or give it a default"
                raise UserError(where, problem, hint)
            continue
        if parameter.name not in hints:
            problem = f"the argument {parameter.name!r} of {path} has no type"
            raise UserError(where, problem, "annotate it, for example `expression: str`")
        # an argument may be called as an attribute of pydantic's models is, so fields have names of their own
        field_name = f"argument_{len(field_names)}"
        field_names[parameter.name] = field_name
        field = _field(parameter, descriptions.pop(parameter.name, None))
        argument_fields[field_name] = (hints[parameter.name], field)
    if unknown := [key for key in descriptions if key not in takes]:
        problem = f"the docstring of {path} describes {unknown[0]!r}, which is no argument of it"
        raise UserError(where, problem, "correct the section `Args:`")
    model, parameter_schema = _model(name, argument_fields, path, where)
    schema = {"name": name, "description": description, "parameters": parameter_schema}
    return Tool(
        name=name,
        function=function,
        bound={key: value for key, value in arguments.items() if key in takes},
        is_async=inspect.iscoroutinefunction(function),
        schema={"type": "function", "function": schema},
        model=model,
        fields=field_names,
    )


def _docstring(function: Callable[..., Any], path: str, where: str) -> str:
    text = (
        (inspect.getdoc(function) or "") if function.__doc__ else ""
    )  # getdoc alone would inherit one
    if not text.strip():
        hint = "say in one what it does: it is what the model reads"
        raise UserError(where, f"{path} has no docstring", hint)
    return text


def _hints(function: Callable[..., Any], path: str, where: str) -> dict[str, Any]:
    """The types of the function's arguments."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        problem = f"the annotations of {path} cannot be read ({describe_error(error)})"
        raise UserError(where, problem, "import the types in its module") from None


def _parameters(
    function: Callable[..., Any], path: str, where: str, *, skip: bool
) -> list[inspect.Parameter]:
    """skip: leave out the first, which is a method's instance."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        hint = "write a Python function around it"
        raise UserError(where, f"{path} has no signature", hint) from None
    if skip:
        parameters = parameters[1:]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in parameters:
        if parameter.kind in (*stars, parameter.POSITIONAL_ONLY):
            argument = stars.get(parameter.kind, "") + parameter.name
            problem = f"{path} takes {argument}, which a model cannot name"
            raise UserError(where, problem, "name its arguments, and no / before them")
    return parameters


def _field(parameter: inspect.Parameter, description: str | None) -> FieldInfo:
    default = ... if parameter.default is parameter.empty else parameter.default
    if description is None:  # given as None it would hide the annotation's own
        return Field(default, alias=parameter.name)
    return Field(default, alias=parameter.name, description=description)


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
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_map:
        return {name: _untitled(value) for name, value in schema.items()}
    return {
        key: value if key in _VERBATIM else _untitled(value, is_map=key in _MAPS)
        for key, value in schema.items()
        if key != "title"
    }


def _described(text: str) -> tuple[str, dict[str, str]]:
    """A docstring without its section `Args:` (Google's form), and what that says of each argument."""
    lines = iter(text.strip().splitlines())
    head = []
    for line in lines:
        if line.strip() in ("Args:", "Arguments:"):
            break
        head.append(line)
    description = "\n".join(head).strip()
    descriptions: dict[str, str] = {}
    section_indent = ""
    name = ""
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() and not indent:  # the section has ended
            return "\n".join([description, "", line, *lines]).strip(), descriptions
        section_indent = section_indent or indent
        entry = _ENTRY.fullmatch(line)
        if entry and indent == section_indent:
            name = entry[1]
            descriptions[name] = entry[2].strip()
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return description, descriptions


def _problems(error: ValidationError) -> str:
    """What is wrong with the arguments of a call, as a part of a sentence."""
    problems = [_problem(detail) for detail in error.errors()]
    more = len(problems) - _MOST_ERRORS
    return "; ".join(problems[:_MOST_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _problem(detail: ErrorDetails) -> str:
    """What is wrong with one argument."""
    kind = detail["type"]
    name = ".".join(map(str, detail["loc"]))
    message = detail["msg"]
    words = message[:1].lower() + message[1:]
    if kind == "missing":
        return f"the argument {name!r} is missing"
    if kind == "extra_forbidden":
        return f"there is no argument {name!r}"
    if kind == "json_invalid":  # nested too deeply, or text that UTF-8 cannot hold
        return f"its arguments are {words}"
    return f"the argument {name!r} is {short(detail['input'])}, and {words}"
