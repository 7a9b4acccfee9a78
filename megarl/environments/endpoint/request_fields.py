"""The body of a chat completion request in OpenAI's form, and what in it cannot be served. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from megarl.environments.agents.chat import ChatRequest
from megarl.types.json_objects import JsonObject, depth

MOST_STOPS = 16
# of one of them: the engine decodes as many tokens after each that it samples
MOST_STOP_BYTES = 128
_MAX_DEPTH = 100  # of lists and objects inside each other: Python's own JSON fails near 1000
# commas and opening brackets, which bound the time of Python's JSON: it lets no other thread run
MOST_MARKS = 2**18
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_CHARACTERS = 100  # of a name that a client has made up
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id")
# of a message; the last four are of answers, as clients send them back
_MAY_BE_EMPTY = ("tool_calls", "refusal", "annotations", "audio", "function_call")
_UNSUPPORTED = "is not supported by this endpoint"
_PROBLEMS = {  # pydantic's name of an error -> what is wrong with the field
    "missing": "is missing",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be a whole number of 1 or more",
    "greater_than_equal": "must be a whole number of 1 or more",
}
# With one seed all samples of a prompt, which are compared with each other, would be the same.
_NO_SEED = f"{_UNSUPPORTED}: run.seed of the recipe seeds the samples; leave it out"


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
    fields = _parse(body)
    try:
        asked = _RequestFields.model_validate(fields)
    except ValidationError as error:
        raise _bad_field(error) from None
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit]
    chat = ChatRequest(
        messages=asked.messages,
        tools=asked.tools if asked.tool_choice == "auto" else (),
        stop=asked.stop,
        max_tokens=min(limits, default=None),
        temperature=asked.temperature,
        top_p=asked.top_p,
    )
    include_usage = asked.stream_options.get("include_usage", False)
    return Completion(asked.model, chat, asked.stream, include_usage)


def _parse(body: bytes) -> JsonObject:
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
    if depth(fields) > _MAX_DEPTH:
        words = f"the body is not read, because it is nested deeper than {_MAX_DEPTH} levels"
        raise BadField("", words)
    return fields


def _no_number(text: str) -> None:
    raise ValueError(f"JSON has no {text}")


def _bad_field(error: ValidationError) -> BadField:
    """The first thing that pydantic found, in the words of this endpoint."""
    detail = error.errors(include_url=False, include_input=False)[0]
    kind = detail["type"]
    place = list(detail["loc"])
    if place[:1] == ["messages"]:
        del place[2:3]  # the role, by which pydantic has chosen the message's class
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return BadField(_written([*place, "role"]), f"must be one of {', '.join(_ROLES)}")
    if kind == "refused":
        refusal = detail.get("ctx", {})
        return BadField(_written([*place, *refusal["inner_place"]]), refusal["problem"])
    if kind == "extra_forbidden":  # a field that another role's messages may have
        is_call = place[-1] == "tool_calls"
        problem = "belongs to the assistant's messages" if is_call else _UNSUPPORTED
        return BadField(_written(place), problem)
    return BadField(_written(place), _PROBLEMS[kind])


def _written(place: Sequence[str | int]) -> str:
    """A place in the body, as in messages[1].content."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".")


def _refusal(problem: str, *inner_place: str) -> PydanticCustomError:
    """What is wrong with the value that a validator has, or with a place in it."""
    details = {"problem": problem, "inner_place": inner_place}
    return PydanticCustomError("refused", "{problem}", details)


def _only(*values: Any) -> AfterValidator:
    """The validator of a field that is taken only with a value that changes nothing."""

    def check(value: Any) -> Any:
        if value not in values:
            allowed = " or ".join(map(json.dumps, values))
            raise _refusal(f"{_UNSUPPORTED}, unless it is {allowed}")
        return value

    return AfterValidator(check)


def _without_nulls(json_value: Any) -> Any:
    """An object's fields but for those that are null, which count as left out."""
    if not isinstance(json_value, dict):
        return json_value
    return {name: value for name, value in json_value.items() if value is not None}


def _known(json_object: JsonObject, known: Collection[str]) -> JsonObject:
    """The same, where all are known. Pydantic would list all unknown ones, which takes long where they are many."""
    fields = _without_nulls(json_object)
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        problem = _NO_SEED if unknown == "seed" else _UNSUPPORTED
        raise _refusal(problem, unknown[:_SHOWN_CHARACTERS])
    return fields


def _message(message: Any) -> Any:
    """A message without what clients only carry along."""
    if not isinstance(message, dict):
        return message
    fields = {name: value for name, value in message.items() if value or name not in _MAY_BE_EMPTY}
    return {"content": "", **_known(fields, _OF_MESSAGES)}


def _options(options: Any) -> Any:
    return _known(options, _StreamOptions.__annotations__) if isinstance(options, dict) else options


def _function(json_value: Any) -> Any:
    """A tool or a call. What clients add to it has no effect: `strict` would ask for a grammar."""
    if not isinstance(json_value, dict) or json_value.get("type") != "function":
        raise _refusal("must be function", "type")
    return _without_nulls(json_value)


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return _without_nulls(part)
    if isinstance(kind, str):
        what = f"of the type {kind[:_SHOWN_CHARACTERS]}"
    else:
        what = "without a type"
    raise _refusal(f"is a part {what}; the model reads parts of the type text alone")


def _joined(content: Any) -> str:
    """The text of a message's content: text, or a list of parts of the type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal("must be text or a list of parts")
    return "".join(part["text"] for part in _PARTS.validate_python(content))


def _texts(stop: Any) -> tuple[str, ...]:
    """The texts of `stop`, which is one text or a list of them."""
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal("must be a text or a list of texts, and none may be empty")
    if len(texts) > MOST_STOPS or any(len(text.encode()) > MOST_STOP_BYTES for text in texts):
        raise _refusal(f"may have {MOST_STOPS} texts of {MOST_STOP_BYTES} bytes in UTF-8 at most")
    return tuple(texts)


def _answerable(messages: list[Any]) -> list[Any]:
    if not messages:
        raise _refusal("has no message")
    if messages[-1]["role"] == "assistant":
        raise _refusal("ends with the assistant's, which is the model's to write")
    return messages


class _Extensible(TypedDict):
    """What else a client adds is left out."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[misc]


class _TextPart(_Extensible):
    text: str


class _CalledFunction(_Extensible):
    name: str
    arguments: str


class _AssistantCall(_Extensible):
    id: str
    type: str
    function: Annotated[_CalledFunction, BeforeValidator(_without_nulls)]


class _OfferedFunction(_Extensible):
    name: str
    description: NotRequired[str]
    parameters: NotRequired[JsonObject]


class _OfferedTool(_Extensible):
    type: str
    function: Annotated[_OfferedFunction, BeforeValidator(_without_nulls)]


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    content: Annotated[str, BeforeValidator(_joined)]
    name: NotRequired[str]


class _SystemMessage(_Message):
    role: Annotated[Literal["system", "developer"], AfterValidator(lambda role: "system")]


class _UserMessage(_Message):
    role: Literal["user"]


class _AssistantMessage(_Message):
    role: Literal["assistant"]
    tool_calls: NotRequired[
        Annotated[list[Annotated[_AssistantCall, BeforeValidator(_function)]], FailFast()]
    ]


class _ToolMessage(_Message):
    role: Literal["tool"]
    tool_call_id: str


class _StreamOptions(_Extensible):
    include_usage: NotRequired[bool]
    include_obfuscation: NotRequired[Any]


_PARTS = TypeAdapter(Annotated[list[Annotated[_TextPart, BeforeValidator(_part)]], FailFast()])
_AnyMessage = Annotated[
    _SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage,
    Field(discriminator="role"),
    BeforeValidator(_message),
]
_TokenLimit = Annotated[int, Field(ge=1)]


class _RequestFields(BaseModel):
    """The fields of a request that are read, and those that are taken as long as they change nothing."""

    model_config = ConfigDict(strict=True)

    n: Annotated[Any, _only(1)] = None
    logit_bias: Annotated[Any, _only({})] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    frequency_penalty: Annotated[Any, _only(0)] = None
    logprobs: Annotated[Any, _only(False)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None
    parallel_tool_calls: Annotated[Any, _only(True)] = None
    store: Annotated[Any, _only(False)] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    messages: Annotated[list[_AnyMessage], FailFast(), AfterValidator(_answerable)]
    tools: Annotated[list[Annotated[_OfferedTool, BeforeValidator(_function)]], FailFast()] = Field(
        default_factory=list
    )
    tool_choice: Annotated[Any, _only("auto", "none")] = "auto"
    model: str
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    max_tokens: _TokenLimit | None = None
    max_completion_tokens: _TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: Annotated[_StreamOptions, BeforeValidator(_options)] = Field(
        default_factory=lambda: _StreamOptions()
    )
    # labels, which have no effect
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: JsonObject) -> JsonObject:
        return _known(body, cls.model_fields)
