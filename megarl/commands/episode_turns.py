"""The turns that `megarl episode-check` plays in the model's place: from messages, made up by schemas, and hostile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.data.files import BadRow, RowErrors
from megarl.episodes.demonstrated_episode import name_and_arguments
from megarl.episodes.tool_calls import MOST_CALLS
from megarl.printable import short
from megarl.types import UserError, UserErrors
from megarl.types.json_objects import ToolSchema

Call = tuple[str, object]  # name, arguments

UNKNOWN_TOOL = "no_such_tool"
_TEXT = "a"
_NUMBER = 1
_MOST_DEPTH = 8  # of values that are made up
_HOSTILE_TEXTS = {
    "1 MB of text": "a" * 2**20,
    "control characters and special tokens": (
        "\x00\x1b[31m\u202e <|im_end|><|endoftext|></s></tool_call><tool_response>"
    ),
    "half of a surrogate pair": "\ud800",  # which UTF-8 cannot hold
}
_MESSAGES = "write a list of messages {role, content, tool_calls} as in OpenAI's chats, beginning with an assistant's"


@dataclass(frozen=True)
class ScriptedTurn:
    """A turn of an assistant. recorded: what the data has after it, the results of its calls or a user's message."""

    content: str
    calls: tuple[Call, ...] = ()
    recorded: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostileTurn:
    """A turn that should cost nobody anything. name: the tool, or `reply`; case: what is wrong with it."""

    name: str
    case: str
    turn: ScriptedTurn


def read_turns(messages: Any) -> list[ScriptedTurn]:
    """The turns of messages in OpenAI's form, with what follows each. Raises BadRow."""
    if not isinstance(messages, list) or not all(isinstance(entry, dict) for entry in messages):
        raise BadRow(f"the messages are {short(messages, 60)}", _MESSAGES)
    turns: list[ScriptedTurn] = []
    for message in messages:
        role = message.get("role", "assistant")
        content = message.get("content") or ""
        if not isinstance(content, str) or (role != "assistant" and not turns) or role == "system":
            raise BadRow(f"a message is {short(message, 60)}", _MESSAGES)
        if role == "assistant":
            turns.append(ScriptedTurn(content, tuple(map(_call, message.get("tool_calls") or ()))))
        else:
            turns[-1] = replace(turns[-1], recorded=(*turns[-1].recorded, content))
    if not turns:
        raise BadRow("there is no assistant's message", _MESSAGES)
    return turns


def turns_of_file(path: Path) -> list[list[ScriptedTurn]]:
    """The episodes of a JSONL file, a list of messages in each line. Raises UserError or UserErrors."""
    episodes = []
    bad = RowErrors("--turns")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = "name a JSONL file, with a list of assistants' messages in each line"
        raise UserError("--turns", f"{path} cannot be read ({error})", hint) from None
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                episodes.append(read_turns(json.loads(line)))
        except BadRow as error:
            bad.add(f"{path}:{number}", error)
        except (ValueError, RecursionError) as error:
            bad.add(f"{path}:{number}", BadRow(f"the line is not JSON ({error})", _MESSAGES))
    if errors := bad.errors():
        raise UserErrors(errors)
    if not episodes:
        raise UserError("--turns", f"{path} has no line", _MESSAGES)
    return episodes


def made_up(schemas: Sequence[ToolSchema], text: str, *, replies: bool) -> list[ScriptedTurn]:
    """A turn with a call for each tool, two of an only one, then turns of text: two where the environment replies."""
    turns = [ScriptedTurn("", (valid_call(schema),)) for schema in schemas]
    if len(schemas) == 1:
        turns *= 2
    return turns + [ScriptedTurn(text)] * (2 if replies else 1)


def valid_call(schema: ToolSchema) -> Call:
    """A call with a value of the right type for every argument."""
    name = schema["function"]["name"]
    parameters = schema["function"]["parameters"]
    return name, example(parameters, parameters.get("$defs", {}))


def example(schema: ToolSchema, types: Mapping[str, ToolSchema], depth: int = 0) -> Any:
    """A value of a JSON schema as pydantic writes it; types: of its references. Patterns and formats are not read."""
    if depth > _MOST_DEPTH:
        return None
    if "$ref" in schema:
        return example(types[schema["$ref"].rpartition("/")[2]], types, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return example(schema[union][0], types, depth + 1)
    match schema.get("type"):
        case "object":
            inner = schema.get("properties", {})
            names = inner if depth == 0 else schema.get("required", ())
            return {name: example(inner[name], types, depth + 1) for name in names}
        case "array":
            items = [*schema.get("prefixItems", ())]
            items += [schema.get("items", {})] * (max(1, schema.get("minItems", 1)) - len(items))
            return [example(item, types, depth + 1) for item in items]
        case "string":
            return _TEXT * max(len(_TEXT), schema.get("minLength", 0))
        case "integer" | "number" as kind:
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
            most = schema.get(
                "maximum", schema.get("exclusiveMaximum", least + _NUMBER) - (kind == "integer")
            )
            number = min(max(least, _NUMBER), most)
            return number if kind == "integer" else float(number)
        case "boolean":
            return True
        case "null":
            return None
    return _TEXT


def hostile_turns(schemas: Sequence[ToolSchema], *, replies: bool) -> Iterator[HostileTurn]:
    """Turns that a model may write, each of which must be answered with a sentence."""
    yield HostileTurn(UNKNOWN_TOOL, "unknown tool", ScriptedTurn("", ((UNKNOWN_TOOL, {}),)))
    for schema in schemas:
        name, valid = valid_call(schema)
        for case, arguments in _hostile_arguments(schema, valid):
            yield HostileTurn(name, case, ScriptedTurn("", ((name, arguments),)))
        yield HostileTurn(
            name, f"{MOST_CALLS} calls at once", ScriptedTurn("", ((name, valid),) * MOST_CALLS)
        )
    if replies:
        for case, text in {"empty text": "", **_HOSTILE_TEXTS}.items():
            yield HostileTurn("reply", case, ScriptedTurn(text))


def _hostile_arguments(schema: ToolSchema, valid: Any) -> Iterator[tuple[str, object]]:
    parameters = schema["function"]["parameters"]
    yield "arguments that are a list", [valid]
    yield "an argument that there is not", {**valid, "no_such_argument": 1}
    for name in parameters.get("required", ())[:1]:
        yield "a missing argument", {key: value for key, value in valid.items() if key != name}
    if not valid:
        return
    yield "arguments of another type", dict.fromkeys(valid, {"": [None]})
    cases = {case: _each(valid, str, text) for case, text in _HOSTILE_TEXTS.items()}
    cases["numbers of 400 digits"] = _each(valid, int, 10**400) | _each(valid, float, 1e308)
    for case, values in cases.items():
        if values:
            yield case, {**valid, **values}
    for depth in (200, 100_000):
        yield f"JSON of {depth} levels", dict.fromkeys(valid, _nested(depth))


def _each(valid: Mapping[str, Any], kind: type, value: object) -> dict[str, object]:
    """The arguments of a type, all with one value."""
    return dict.fromkeys(
        (name for name, argument in valid.items() if type(argument) is kind), value
    )


def _nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


def _call(data_call: Any) -> Call:
    name, arguments = name_and_arguments(data_call)
    return str(name), arguments
