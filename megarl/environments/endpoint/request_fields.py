"""The body of a chat completion request in OpenAI's form, and what in it cannot be served. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.environments.agents.chat import ChatRequest

_SAMPLING = {"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop"}
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_READ = {"model", "messages", "tools", "tool_choice", "stream", "stream_options"}
_ONLY: Mapping[str, tuple[Any, ...]] = {  # the values with which these change nothing
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# With one seed all samples of a prompt, which are compared with each other, would be the same.
_REFUSED = {
    "seed": "is not supported by this endpoint: run.seed of the recipe seeds the samples; leave it out"
}
MOST_STOPS = 16
# of one of them: the engine decodes as many tokens after each that it samples
MOST_STOP_BYTES = 128
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# of answers, as clients send them back
_EMPTY_EXTRAS = ("refusal", "annotations", "audio", "function_call")
_MAX_DEPTH = 100  # of lists and objects inside each other: Python's own JSON fails near 1000
# commas and opening brackets, which bound the time of Python's JSON: it lets no other thread run
MOST_MARKS = 2**18
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class BadField(Exception):
    """A part of a request that cannot be served. param: its name, "" for the body; the text is for the agent."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}" if param else problem)
        self.param = param


@dataclass(frozen=True)
class Completion:
    """What a body asks for. model: the client's own name of the model, which is given back to it."""

    model: str
    chat: ChatRequest
    stream: bool
    include_usage: bool


def read_body(body: bytes) -> Completion:
    """The request in a body. Raises BadField."""
    fields = {name: value for name, value in _parse(body).items() if value is not None}
    for name, value in fields.items():
        if name in _ONLY and value not in _ONLY[name]:
            allowed = " or ".join(json.dumps(one) for one in _ONLY[name])
            raise BadField(name, f"is not supported by this endpoint, unless it is {allowed}")
        if name not in _SAMPLING | _LABELS | _READ | _ONLY.keys():
            raise BadField(name[:100], _REFUSED.get(name, "is not supported by this endpoint"))
    messages = _typed(fields, "messages", list, required=True)
    if not messages:
        raise BadField("messages", "has no message")
    read = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise BadField("messages", "ends with the assistant's, which is the model's to write")
    tools = [
        _tool(f"tools[{index}]", tool) for index, tool in enumerate(_typed(fields, "tools", list))
    ]
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BadField(
            "tool_choice", 'is not supported by this endpoint, unless it is "auto" or "none"'
        )
    return Completion(
        model=_typed(fields, "model", str, required=True),
        chat=ChatRequest(
            messages=read,
            tools=tools if choice == "auto" else (),
            stop=_stop(fields),
            max_tokens=_max_tokens(fields),
            temperature=_number(fields, "temperature"),
            top_p=_number(fields, "top_p"),
        ),
        stream=_typed(fields, "stream", bool),
        include_usage=_typed(_stream_options(fields), "include_usage", bool),
    )


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of `stop`, which is one text or a list of them."""
    given = fields.get("stop", [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadField("stop", "must be a text or a list of texts, and none may be empty")
    if len(texts) > MOST_STOPS or any(len(text.encode()) > MOST_STOP_BYTES for text in texts):
        raise BadField(
            "stop", f"may have {MOST_STOPS} texts of {MOST_STOP_BYTES} bytes in UTF-8 at most"
        )
    return tuple(texts)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """The smaller of the two fields that limit the answer."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    for name in names:
        if type(fields[name]) is not int or fields[name] < 1:
            raise BadField(name, "must be a whole number of 1 or more")
    return min((fields[name] for name in names), default=None)


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and type(value) not in (int, float):
        raise BadField(name, "must be a number")
    return value


def _parse(body: bytes) -> dict[str, Any]:
    marks = sum(map(body.count, (b",", b"[", b"{")))
    if marks > MOST_MARKS:
        words = f"the body is not read, because it has {marks} commas and opening brackets, more than {MOST_MARKS}"
        raise BadField("", words)
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        if _HALF_PAIR.search(body):  # a surrogate, which JSON can escape and UTF-8 cannot encode
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise BadField("", "the body is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise BadField("", "the body is not a JSON object")
    level: list[Any] = [fields]
    for _ in range(_MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise BadField(
            "", f"the body is not read, because it is nested deeper than {_MAX_DEPTH} levels"
        )
    return fields


def _no_number(text: str) -> None:
    raise ValueError(f"JSON has no {text}")


def _typed(
    fields: Mapping[str, Any], name: str, kind: type, *, required: bool = False, where: str = ""
) -> Any:
    """A field's value, or the empty value of its type. Raises BadField where it is missing or of another type."""
    value = fields.get(name)
    if value is None and not required:
        return kind()
    if not isinstance(value, kind):
        words = {str: "text", list: "a list", dict: "an object", bool: "true or false"}[kind]
        raise BadField(where + name, "is missing" if value is None else f"must be {words}")
    return value


def _stream_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = _typed(fields, "stream_options", dict)
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise BadField(f"stream_options.{name[:100]}", "is not supported by this endpoint")
    return options


def _message(where: str, message: object) -> dict[str, Any]:
    """A message with text as its content and nothing that clients only carry along."""
    if not isinstance(message, dict):
        raise BadField(where, "must be an object")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.pop("role", None)
    if not isinstance(role, str) or role not in _ROLES:
        raise BadField(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    calls = given.pop("tool_calls", [])
    read: dict[str, Any] = {
        "role": _ROLES[role],
        "content": _text(f"{where}.content", given.pop("content", None)),
    }
    if calls and role != "assistant":
        raise BadField(f"{where}.tool_calls", "belongs to the assistant's messages")
    if calls:
        calls = _typed({"tool_calls": calls}, "tool_calls", list, where=f"{where}.")
        read["tool_calls"] = [
            _call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    if role == "tool":
        read["tool_call_id"] = _typed(given, "tool_call_id", str, required=True, where=f"{where}.")
        del given["tool_call_id"]
    if "name" in given:
        read["name"] = _typed(given, "name", str, where=f"{where}.")
        del given["name"]
    for name, value in given.items():
        if name not in _EMPTY_EXTRAS or value:
            raise BadField(f"{where}.{name[:100]}", "is not supported by this endpoint")
    return read


def _text(where: str, content: object) -> str:
    """The text of a message's content: text, or a list of parts of the type text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(where, "must be text or a list of parts")
    for index, part in enumerate(content):
        if isinstance(part, dict):
            kind = part.get("type")
        else:
            kind = None
        if kind != "text":
            if isinstance(kind, str):
                what = f"of the type {kind[:100]}"
            else:
                what = "without a type"
            raise BadField(
                f"{where}[{index}]",
                f"is a part {what}; the model reads parts of the type text alone",
            )
    return "".join(
        _typed(part, "text", str, required=True, where=f"{where}[{index}].")
        for index, part in enumerate(content)
    )


def _call(where: str, value: object) -> dict[str, Any]:
    call, function = _function(where, value)
    arguments = _typed(function, "arguments", str, required=True, where=f"{where}.function.")
    number = _typed(call, "id", str, required=True, where=f"{where}.")
    return {
        "id": number,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(where: str, value: object) -> dict[str, Any]:
    """A tool without `strict`, which would ask for a grammar."""
    _, function = _function(where, value)
    schema = {"name": function["name"]}
    for name, kind in (("description", str), ("parameters", dict)):
        if function.get(name) is not None:
            schema[name] = _typed(function, name, kind, where=f"{where}.function.")
    return {"type": "function", "function": schema}


def _function(where: str, value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool or a call, and its function, which has a name."""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise BadField(f"{where}.type", "must be function")
    function = _typed(value, "function", dict, required=True, where=f"{where}.")
    _typed(function, "name", str, required=True, where=f"{where}.function.")
    return value, function
