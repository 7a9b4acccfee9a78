"""Functions become schemas; the arguments that models write are checked without being converted."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from megarl.environments.runtime.tools import BadArguments, Tool, make_tool
from megarl.types import UserError


def tool(function: Callable[..., Any], **arguments: Any) -> Tool:
    return make_tool(
        function, function.__name__, "episode.tools", "m:f", arguments=arguments, is_method=False
    )


def schema(function: Callable[..., Any], **arguments: Any) -> Any:
    tool_schema = tool(function, **arguments).schema
    assert tool_schema["type"] == "function" and json.loads(json.dumps(tool_schema)) == tool_schema
    return tool_schema["function"]


@dataclass
class Point:
    x: int
    title: str = "none"


def everything(
    text: str,
    number: int,
    ratio: float,
    flag: bool,
    mode: Literal["a", "b"],
    items: list[str],
    point: Point,
    bounded: Annotated[int, Field(ge=1, description="at least one")],
    model_config: str,
    title: str | None = None,
    copy: dict[str, int] = {},  # noqa: B006 - as a user may write it
) -> str:
    """Take everything.

    It has more lines.

    Args:
        text: what to take,
            on two lines
        number (int): how many

    Returns:
        nothing of use
    """
    return ""


def test_a_schema_is_made_of_types_defaults_and_docstring() -> None:
    tool_schema = schema(everything)
    assert tool_schema["name"] == "everything"
    assert (
        tool_schema["description"]
        == "Take everything.\n\nIt has more lines.\n\nReturns:\n    nothing of use"
    )
    parameters = tool_schema["parameters"]
    properties = parameters["properties"]
    assert properties["text"] == {"type": "string", "description": "what to take, on two lines"}
    assert properties["number"] == {"type": "integer", "description": "how many"}
    assert properties["ratio"] == {"type": "number"} and properties["flag"] == {"type": "boolean"}
    assert properties["mode"] == {"type": "string", "enum": ["a", "b"]}
    assert properties["items"] == {"type": "array", "items": {"type": "string"}}
    assert properties["bounded"] == {"type": "integer", "minimum": 1, "description": "at least one"}
    assert properties["title"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert properties["copy"]["default"] == {}
    assert parameters["required"] == [*everything.__annotations__][:9]
    (point,) = parameters["$defs"].values()
    assert (
        point["properties"]["title"] == {"type": "string", "default": "none"}
        and "title" not in point
    )
    assert "additionalProperties" not in parameters and "title" not in parameters


def test_a_function_without_arguments_has_an_object_without_properties() -> None:
    def now() -> str:
        """The time."""
        return ""

    assert schema(now)["parameters"] == {"type": "object", "properties": {}}


def paint(colour: str, size: int = 1, *, brush: str = "thin", palette: str = "p") -> str:
    """Paint."""
    return f"{colour} {size} {brush} {palette}"


def test_arguments_of_the_recipe_are_hidden_from_the_model() -> None:
    assert [*schema(paint)["parameters"]["properties"]] == ["colour", "size"]
    bound = tool(paint, brush="wide", size=3, other="of another tool")
    assert [*bound.schema["function"]["parameters"]["properties"]] == ["colour"]
    assert bound.function(**bound.values({"colour": "red"})) == "red 3 wide p"
    for hidden in ("brush", "palette", "size"):
        with pytest.raises(BadArguments, match=f"there is no argument '{hidden}'"):
            bound.values({"colour": "red", hidden: "x"})


def test_arguments_come_as_the_types_of_the_function() -> None:
    def move(
        point: Point, day: datetime.date, rest: tuple[int, ...] = (), ratio: float = 1.0
    ) -> str:
        """Move."""
        return ""

    move_tool = tool(move)
    values = move_tool.values({"point": {"x": 1}, "day": "2026-01-02", "rest": [1, 2], "ratio": 3})
    assert values == {
        "point": Point(1),
        "day": datetime.date(2026, 1, 2),
        "rest": (1, 2),
        "ratio": 3.0,
    }
    assert move_tool.values({"point": {"x": 1}, "day": "2026-01-02"}).keys() == {"point", "day"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "paint was not called: the argument 'colour' is missing."),
        (
            {"colour": 3},
            "paint was not called: the argument 'colour' is 3, and input should be a valid string.",
        ),
        (
            {"colour": "x", "size": "1"},
            "the argument 'size' is '1', and input should be a valid integer",
        ),
        (
            {"colour": "x", "size": True},
            "the argument 'size' is True, and input should be a valid integer",
        ),
        (
            {"colour": "x", "size": 1.5},
            "the argument 'size' is 1.5, and input should be a valid integer",
        ),
        ({"color": "x"}, "the argument 'colour' is missing; there is no argument 'color'."),
        ({str(n): n for n in range(9)}, " and 7 more."),
        ([], "its arguments are not a JSON object."),
        ("{}", "its arguments are not a JSON object."),
        (None, "its arguments are not a JSON object."),
        ({"colour": "x" * 10_000, "size": "y" * 10_000}, "yyy..."),
        ({"colour": object()}, "paint was not called: TypeError"),
        ({"colour": "\ud800"}, "its arguments are invalid JSON: unexpected end of hex escape"),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_a_sentence(arguments: Any, says: str) -> None:
    with pytest.raises(BadArguments) as caught:
        tool(paint).values(arguments)
    text = str(caught.value)
    assert says in text and "\n" not in text and len(text) < 500


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.sampled_from(["colour", "size", "x"]), anything) | anything)
def test_arguments_are_taken_as_they_are_or_refused(arguments: Any) -> None:
    try:
        values = tool(paint).values(arguments)
    except BadArguments:
        values = None
    right = isinstance(arguments, dict) and arguments.keys() <= {"colour", "size"}
    right = (
        right and isinstance(arguments.get("colour"), str) and type(arguments.get("size", 0)) is int
    )
    if right and not any("\ud800" <= letter <= "\udfff" for letter in arguments["colour"]):
        assert values == arguments
    elif not right:
        assert values is None


def no_docstring(text: str) -> str:
    return text


def blank_docstring(text: str) -> str:
    """ """
    return text


def untyped(text) -> str:  # type: ignore[no-untyped-def]
    """Untyped."""
    return text


def stars(*texts: str) -> str:
    """Stars."""
    return ""


def double_stars(**texts: str) -> str:
    """Stars."""
    return ""


def by_place(text: str, /) -> str:
    """By place."""
    return text


def callback(function: Callable[[], int]) -> str:
    """Call back."""
    return ""


class Opaque:
    pass


def opaque(thing: Opaque) -> str:
    """Opaque."""
    return ""


def odd_default(thing: Any = Opaque()) -> str:  # noqa: B008 - as a user may write it
    """Odd."""
    return ""


def unknown_name(thing: NoSuchType) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Unknown."""
    return ""


def told_of_another(text: str) -> str:
    """Told.

    Args:
        txet: misspelt
    """
    return text


def needs(text: str, *, corpus: str) -> str:
    """Needs."""
    return text


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "m:f has no docstring"),
        (blank_docstring, "m:f has no docstring"),
        (untyped, "the argument 'text' of m:f has no type"),
        (stars, "takes *texts, which a model cannot name"),
        (double_stars, "takes **texts, which a model cannot name"),
        (by_place, "takes text, which a model cannot name"),
        (callback, "has a type or a default that JSON cannot hold"),
        (opaque, "has a type or a default that JSON cannot hold"),
        (odd_default, "has a type or a default that JSON cannot hold"),
        (unknown_name, "NameError: name 'NoSuchType' is not defined"),
        (told_of_another, "describes 'txet', which is no argument of it"),
        (needs, "needs 'corpus', which only has a keyword"),
    ],
)
def test_what_cannot_be_a_tool_is_an_error(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        tool(function)
    assert (
        caught.value.where == "episode.tools"
        and problem in caught.value.problem
        and caught.value.hint
    )


def test_a_name_that_no_model_can_call_is_an_error() -> None:
    with pytest.raises(UserError, match="a name that no model can call"):
        make_tool(paint, "größe", "episode.tools", "m:f", arguments={}, is_method=False)
