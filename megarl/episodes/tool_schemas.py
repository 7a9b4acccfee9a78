"""The schemas of tools, and the comparison of arguments with them. Pure: nothing is fetched for a schema.

The schemas of an agent's tools may come from a program that is only trusted to ask. So only keywords are kept whose
cost is bounded by the sizes of schema and arguments (`pattern` is not one), and each reference is replaced by its
target, up to 256 parts, since each costs time for each part of the arguments. Dropping keywords never makes a schema
refuse more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator  # a requirement of Ray
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry  # a requirement of jsonschema

from megarl.episodes.template import TOOLS
from megarl.printable import describe_error, first_line, short
from megarl.types import UserError
from megarl.types.json_objects import CallArguments, JsonObject, ToolSchema

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MOST_PARTS = 2**8  # of an agent's schema; when it has more no further reference is followed
_KINDS = ["array", "boolean", "integer", "null", "number", "object", "string"]
_Rule = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_BOUNDS: Mapping[str, _Rule] = {  # keywords without schemas in them, and which values they may have
    "type": lambda value: all(
        kind in _KINDS for kind in (value if isinstance(value, list) else [value])
    ),
    "enum": lambda value: isinstance(value, list),
    "const": lambda value: True,
    "required": lambda value: (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _is_size,
    ),
}
_WITH_ONE = ("additionalProperties", "items")
_WITH_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_KEPT = {*_BOUNDS, *_WITH_ONE, *_WITH_SEVERAL, "properties"}


def comparable_schema(schema: ToolSchema, *, is_users: bool) -> JsonObject:
    """The schema with which a tool's calls are read and validated. is_users: the tool is the user's, not an agent's.

    Unlisted arguments are wrong unless the schema allows them. Raises UserError(episode.tools) where it is wrong.
    """
    name, description, parameters = _parts(schema)
    if reference := _bad_reference(parameters):
        problem = f"the parameters of {name} refer to {reference!r:.80}, which is no place in them"
        raise UserError(
            TOOLS, problem, "define the type in their $defs, and refer to it as #/$defs/NAME"
        )
    try:
        if is_users:
            Draft202012Validator.check_schema(parameters)
        else:
            parameters = _BoundedSchemas(parameters).of_arguments()
    except (SchemaError, RecursionError, _BadSchema) as error:
        problem = f"the parameters of {name} are not a JSON schema ({first_line(error)})"
        raise UserError(TOOLS, problem, "correct the types of the tool's arguments") from error
    parameters.setdefault("type", "object")
    if "properties" in parameters:
        parameters.setdefault("additionalProperties", False)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def make_validator(schema: ToolSchema) -> Draft202012Validator:
    """The validator of a tool's arguments, which fetches nothing. schema: of `comparable_schema`."""
    return Draft202012Validator(schema["function"]["parameters"], registry=Registry())


def misfit(validator: Draft202012Validator, arguments: CallArguments) -> str | None:
    """What is wrong with the arguments of a call, in words for the model; None: they fit."""
    try:
        wrong = best_match(validator.iter_errors(arguments))
    except Exception as error:  # an infinity, arguments that are nested too deep, a type that refers to itself alone
        return f"the arguments cannot be compared with the tool's types ({describe_error(error)})"
    if wrong is None:
        return None
    place = ".".join(map(str, wrong.absolute_path))
    if place:
        return f"argument {place}: {wrong.message}"
    return wrong.message


def _parts(schema: Any) -> tuple[str, str | None, JsonObject]:
    """The name, the description and the parameters of a tool."""
    try:
        function = schema["function"]
        name = function["name"]
        description = function.get("description")
        parameters = function.get("parameters")
        if isinstance(name, str) and isinstance(description, str | None):
            return name, description, dict(parameters or {})
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    hint = 'write {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    raise UserError(TOOLS, f"{str(schema)[:80]} is not the schema of a tool", hint)


class _BadSchema(Exception):
    """The text says why it is none."""


class _BoundedSchemas:
    """Schemas without references, and with those of their keywords alone whose cost is bounded. root: the whole."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._parts = 0

    def of_arguments(self) -> JsonObject:
        """The whole. Raises _BadSchema, also where it refers to a schema that has no keywords (true or false)."""
        schema = self.of(self._root)
        if not isinstance(schema, dict):
            raise _BadSchema(f"it is {schema}")
        return schema

    def of(self, schema: Any, followed: tuple[str, ...] = ()) -> Any:
        """followed: the references that led here, which are not followed again. Raises _BadSchema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _BadSchema(f"{short(schema)} is none")
        self._parts += 1
        kept = {
            key: self._kept(key, value, followed) for key, value in schema.items() if key in _KEPT
        }
        if "oneOf" in kept:
            kept.setdefault("anyOf", kept.pop("oneOf"))
        if "patternProperties" in schema:  # the names that it allows are not unlisted
            kept["additionalProperties"] = True
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in followed or self._parts > _MOST_PARTS:
            return kept
        target = self.of(_target(self._root, reference), (*followed, reference))
        if kept:
            return {"allOf": [target, kept]}
        return target

    def _kept(self, key: str, value: Any, followed: tuple[str, ...]) -> Any:
        if key in _WITH_ONE:
            return self.of(value, followed)
        if key in _WITH_SEVERAL and isinstance(value, list):
            return [self.of(schema, followed) for schema in value]
        if key == "properties" and isinstance(value, dict):
            return {name: self.of(schema, followed) for name, schema in value.items()}
        if key not in _BOUNDS or not _BOUNDS[key](value):
            raise _BadSchema(f"{short(value)} is no value of {key!r}")
        return value


def _bad_reference(schema: ToolSchema) -> str | None:
    """A reference that leads out of a schema, or nowhere."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            for reference in map(part.get, _REFERENCES):
                if isinstance(reference, str) and not _leads(schema, reference):
                    return reference
    return None


def _leads(schema: ToolSchema, reference: str) -> bool:
    try:
        _target(schema, reference)
    except (LookupError, TypeError, ValueError):
        return False
    return True


def _target(schema: ToolSchema, reference: str) -> Any:
    """The place in a schema that a JSON pointer names. Raises LookupError, TypeError and ValueError for all else."""
    start, *names = unquote(reference).split("/")
    if start != "#":
        raise ValueError(f"{reference} is no pointer into the schema")
    target: Any = schema
    for name in names:
        target = target[
            int(name) if isinstance(target, list) else name.replace("~1", "/").replace("~0", "~")
        ]
    return target
