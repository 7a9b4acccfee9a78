"""JSON schemas of recipes, overlays and hardware files, for editors: pydantic makes them of their classes.

Editors with the YAML language server read it where the first line of a recipe names it. It refuses unknown keys, wrong
types and values out of range; what depends on several keys only megarl checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.config.hardware import Hardware

JsonSchema = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NULL = {"type": "null"}


def recipe_schema() -> JsonSchema:
    """The schema of a whole recipe."""
    return _schema_of(Recipe, "A recipe of megarl")


def hardware_schema() -> JsonSchema:
    """The schema of a hardware file."""
    return _schema_of(Hardware, "The figures of a GPU and its node for megarl")


def _schema_of(branch: type[Branch], title: str) -> JsonSchema:
    schema = branch.model_json_schema()
    for node in _nodes(schema):
        node.pop("title", None)  # it repeats the key
        if "description" in node:
            node["description"] = _unwrapped(node["description"])
        if "patternProperties" in node:
            node["additionalProperties"] = False
    return {"$schema": _DIALECT, "title": title, **schema}


def overlay_schema() -> JsonSchema:
    """The schema of an overlay: any key may be left out, and null takes entries under names of the user's own out."""
    schema = recipe_schema()
    for node in list(_nodes(schema)):
        node.pop("required", None)
        if named_entries(node):
            _let_be_null(node)
    return {**schema, "title": "An overlay of recipes of megarl"}


def _unwrapped(text: str) -> str:
    """A docstring with one line for each of its paragraphs."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def named_entries(node: JsonSchema) -> list[JsonSchema]:
    """The schemas of a mapping's entries under names of the user's own, as data.eval.NAME; else empty."""
    entries = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
    return [entry for entry in entries if isinstance(entry, dict) and "$ref" in entry]


def _let_be_null(node: JsonSchema) -> None:
    """Let the entries of a mapping with names of the user's own be null, and the mapping itself, in place."""
    node["type"] = ["object", "null"]
    for entry in named_entries(node):
        reference = entry.pop("$ref")
        entry["anyOf"] = [{"$ref": reference}, _NULL]


def _nodes(schema: Any) -> Iterator[JsonSchema]:
    """Every schema inside of a schema, itself included; defaults are values, and no schemas."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("$defs", "properties", "patternProperties"):
        for inner in schema.get(name, {}).values():
            yield from _nodes(inner)
    for inner in schema.get("anyOf", ()):
        yield from _nodes(inner)
    for name in ("items", "additionalProperties"):
        yield from _nodes(schema.get(name))
