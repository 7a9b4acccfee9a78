"""Schemas of tools: what is refused, what of an agent's is compared, and that nothing is fetched for them."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from pydantic import BaseModel, Field, create_model

from megarl.episodes.tool_schemas import comparable_schema, make_validator, misfit
from megarl.types import UserError

CATASTROPHE = "^(a+)+$"  # takes twice the time for each further a


def tool(parameters: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}


def with_argument(schema: Any, **more: Any) -> dict[str, Any]:
    return tool({"type": "object", "properties": {"a": schema}, **more})


def error_of(schema: Any, *, is_users: bool) -> str:
    with pytest.raises(UserError) as caught:
        comparable_schema(schema, is_users=is_users)
    return caught.value.problem


def found(schema: Any, arguments: Any, *, is_users: bool = False) -> str | None:
    return misfit(make_validator(comparable_schema(schema, is_users=is_users)), arguments)


def test_an_agents_schema_that_leads_to_true_is_refused() -> None:
    assert error_of(tool({"$ref": "#/$defs/x", "$defs": {"x": True}}), is_users=False).endswith(
        "(it is True)"
    )


@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.parametrize(
    "reference",
    [
        "#/$defs/nope",
        "#nope",
        "nope",
        "#/properties/a/enum/x",
        "#/properties/a/enum/7",
        "http://127.0.0.1:1/x",
    ],
)
def test_a_reference_that_leads_nowhere_or_out_is_refused(reference: str, is_users: bool) -> None:
    words = error_of(with_argument({"enum": [1], "$ref": reference}), is_users=is_users)
    assert words == f"the parameters of f refer to {reference!r}, which is no place in them"
    assert "refer to" in error_of(with_argument({"$dynamicRef": reference}), is_users=is_users)


@pytest.mark.parametrize("is_users", [True, False])
def test_nothing_is_fetched(is_users: bool) -> None:
    """Neither for the schema's own name, nor for what a name in it makes of a reference."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        inside = {"$id": f"{url}/inside", "$ref": "#/$defs/b"}
        outside = {"$id": f"{url}/x", "$schema": f"{url}/y", "$defs": {"b": {"type": "string"}}}
        error = found(with_argument(inside, **outside), {"a": "x"}, is_users=is_users)
        assert (error is None) != is_users, (
            "of the user's own the name counts, and nothing is there"
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"function": {"name": 5}}, {"function": 5}, tool({}, description=5), tool("x"), tool({"type": 5}),
        with_argument({"type": [{}]}), with_argument({"required": "a"}), with_argument({"multipleOf": 0}),
        with_argument({"minimum": True}), with_argument({"maxLength": -1}), tool({"properties": []}),
        with_argument({"enum": 5}), with_argument({"type": "int"}),
        with_argument(5), with_argument({"anyOf": 5}), with_argument({"items": [{}]}),
    ],
)  # fmt: skip
def test_what_is_no_schema_is_refused(schema: Any, is_users: bool) -> None:
    assert (
        "the schema of a tool" in (words := error_of(schema, is_users=is_users))
        or "not a JSON schema" in words
    )


@pytest.mark.parametrize("is_users", [True, False])
def test_a_schema_that_is_nested_too_deep_is_refused(is_users: bool) -> None:
    schema: Any = {"type": "string"}
    for _ in range(400):
        schema = {"items": schema}
    assert "not a JSON schema (maximum recursion depth" in error_of(
        with_argument(schema), is_users=is_users
    )


def test_a_type_that_refers_to_itself_alone_is_told_when_it_is_called() -> None:
    schema = with_argument({"$ref": "#/properties/a"})
    error = found(schema, {"a": 1}, is_users=True)
    assert error and error.startswith(
        "the arguments cannot be compared with the tool's types (RecursionError"
    )
    assert found(schema, {"a": 1}) is None


def test_a_number_that_is_no_float_is_told() -> None:
    """jsonschema divides by the step, and makes an integer of the quotient."""
    error = found(with_argument({"multipleOf": 0.1}), {"a": json.loads("Infinity")}, is_users=True)
    assert error and "OverflowError" in error


class _Leaf(BaseModel):
    text: str = Field(pattern=CATASTROPHE)


class _Tree(BaseModel):
    size: int = Field(ge=1)
    leaf: _Leaf | None = None
    children: list[_Tree] = []


ARGUMENTS = create_model("arguments", tree=_Tree, kind=(str, "a"))


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"tree": {"size": 0}}, "tree.size"), ({"tree": {}}, "tree"), ({}, "'tree' is a required"),
        ({"tree": {"size": 1, "leaf": {"text": 5}}}, "tree.leaf"), ({"tree": {"size": 1}, "more": 1}, "Additional"),
        ({"tree": {"size": 1, "children": 5}}, "tree.children"), ({"tree": {"size": 1}, "kind": 5}, "kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_the_types_of_an_agents_tools_are_compared_through_references(
    arguments: Any, place: str
) -> None:
    for is_users in (True, False):
        assert place in str(
            found(tool(ARGUMENTS.model_json_schema()), arguments, is_users=is_users)
        )
    fits = {"tree": {"size": 1, "leaf": {"text": "a"}, "children": [{"size": 2}]}, "kind": "b"}
    assert found(tool(ARGUMENTS.model_json_schema()), fits) is None


def test_a_type_inside_itself_is_compared_once() -> None:
    """Of an agent's tools; of the user's own at every level."""
    schema, inner = (
        tool(ARGUMENTS.model_json_schema()),
        {"tree": {"size": 1, "children": [{"size": 0}]}},
    )
    assert found(schema, inner) is None
    assert "tree.children.0.size" in str(found(schema, inner, is_users=True))


def test_a_pattern_of_an_agents_tool_is_not_executed() -> None:
    """The user's own is."""
    longest = {"a": "a" * 4000 + "!"}
    for schema in (
        with_argument({"pattern": CATASTROPHE}),
        with_argument({"propertyNames": {"pattern": CATASTROPHE}}),
        tool({"properties": {}, "patternProperties": {CATASTROPHE: False}}),
        with_argument({"not": {"if": {"pattern": CATASTROPHE}}}),
        with_argument({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"pattern": CATASTROPHE}}}),
    ):
        kept = json.dumps(comparable_schema(schema, is_users=False))
        assert found(schema, longest) is None and CATASTROPHE not in kept
        assert found(schema, {"a" * 4000 + "!": {"a" * 4000 + "!": 1}}) in (None, *_UNLISTED)
    assert found(with_argument({"pattern": "^b$"}), {"a": "c"}, is_users=True)


_UNLISTED = [f"Additional properties are not allowed ('{'a' * 4000}!' was unexpected)"]


def test_what_is_not_compared_accepts_no_less() -> None:
    """Names that a pattern allows, one of several schemas that differ in what is left out, and negations."""
    two = [{"type": "string", "format": "date"}, {"type": "string", "format": "time"}]
    assert found(with_argument({"oneOf": two}), {"a": "x"}) is None
    assert found(with_argument({"oneOf": two}), {"a": 5})
    assert found(with_argument({"not": {"pattern": "x"}}), {"a": "y"}) is None
    assert (
        found(tool({"properties": {"a": {}}, "patternProperties": {"^x": {}}}), {"xy": 1}) is None
    )
    argument = {"$ref": "#/$defs/b", "minimum": 3}
    schema = with_argument(argument, **{"$defs": {"b": {"type": "integer"}}})
    assert [found(schema, {"a": value}) is None for value in (2, 3, 3.5)] == [False, True, False]


def test_references_that_multiply_are_compared_a_limited_number_of_times() -> None:
    """Each of 40 types refers twice to the next, so that one value would be compared 2**40 times."""
    types = {f"t{n}": {"anyOf": [{"$ref": f"#/$defs/t{n + 1}"}] * 2} for n in range(40)} | {
        "t40": {"type": "string"}
    }
    schema = with_argument({"$ref": "#/$defs/t0"}, **{"$defs": types})
    assert (
        len(json.dumps(comparable_schema(schema, is_users=False))) < 2**20
        and found(schema, {"a": 5}) is None
    )
