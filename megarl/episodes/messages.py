"""Messages in OpenAI's form, as agents write them and episodes record them, made ready for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from megarl.episodes.template import ChatTemplate, TemplateRefusal, as_utf8
from megarl.episodes.tool_calls import BadCall, ToolCall, Turn
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.types import UserError
from megarl.types.json_objects import JsonObject, Message

_ROLES = {"system", "user", "assistant", "tool"}
_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls")
_MOST_MESSAGES = 4096  # of one request


class BadMessages(Exception):
    """The messages cannot be made into a prompt; the text says why."""


def checked(messages: Sequence[Message], template: ChatTemplate) -> list[JsonObject]:
    """The messages with texts as contents, without special tokens in all that the model did not write.

    Keys with a null value, and those that the chat of an agent has no use for, are left out. Raises BadMessages.
    """
    if not messages or len(messages) > _MOST_MESSAGES:
        raise BadMessages(
            f"there are {len(messages)} messages, and 1 to {_MOST_MESSAGES} are allowed"
        )
    chat = [_checked(number, message, template) for number, message in enumerate(messages, start=1)]
    if chat[-1]["role"] == "assistant":
        raise BadMessages("the last message is the assistant's")
    return chat


def _checked(number: int, message: Any, template: ChatTemplate) -> JsonObject:
    if isinstance(message, Mapping):
        role = message.get("role")
    else:
        role = None
    if not isinstance(role, str) or role not in _ROLES:
        raise BadMessages(f"message {number} has no role out of {', '.join(sorted(_ROLES))}")
    fields = {key: message[key] for key in _KEYS if message.get(key) not in (None, [])}
    content = fields.pop("content", "")
    calls = fields.pop("tool_calls", [])
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    content = _text(content, f"the content of message {number}")
    if role != "assistant":
        content = template.without_special_tokens(content)
    if not isinstance(calls, list):
        raise BadMessages(f"the tool_calls of message {number} are no list")
    if calls and role != "assistant":
        raise BadMessages(f"message {number} has tool_calls, and is not the assistant's")
    if role == "tool" and "tool_call_id" not in fields:
        raise BadMessages(f"message {number} is a tool's and has no tool_call_id")
    checked_message: JsonObject = {
        key: _text(value, f"the {key} of message {number}") for key, value in fields.items()
    }
    checked_message["content"] = content
    if calls:
        checked_message["tool_calls"] = [_call(number, call) for call in calls]
    return checked_message


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadMessages(f"{what} is no text")
    if value != as_utf8(value):
        raise BadMessages(f"{what} has half a surrogate pair, which is no character")
    return value


def _part(number: int, part: Any) -> str:
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return part["text"]
    raise BadMessages(f"a part of message {number} is no text")


def _call(number: int, call: Any) -> JsonObject:
    """A call with arguments as JSON text."""
    try:
        id = call["id"]
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
    except (KeyError, TypeError):
        raise BadMessages(
            f"a call of message {number} has no id, or no function with name and arguments"
        ) from None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    id, name, arguments = (
        _text(value, f"a value of a call of message {number}") for value in (id, name, arguments)
    )
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def rendered(messages: Sequence[Message], turn_tokenizer: TurnTokenizer) -> list[int]:
    """The tokens of checked messages, up to and with the generation prompt. Raises BadMessages."""
    try:
        return turn_tokenizer.first(_for_template(messages, turn_tokenizer.template))
    except (UserError, TemplateRefusal) as refusal:
        raise BadMessages(f"the chat template refuses the messages ({refusal})") from refusal


def said(
    messages: Sequence[Message],
    turn: Message,
    turn_tokenizer: TurnTokenizer,
    stop: int | None,
) -> list[int] | None:
    """The tokens of checked messages after a turn; None where they cannot be spliced.

    stop: the stop token with which the turn ended; None: a stop text ended it. turn: the assistant's message
    before them, whose calls have ids of their own. They are spliced where they are one user's message, or the results
    of all calls of the turn in any order, and the chat template takes them so.
    """
    roles = [message["role"] for message in messages]
    calls = turn.get("tool_calls", [])
    try:
        if roles == ["user"] and not calls:
            return turn_tokenizer.user(messages[0]["content"], after=stop)
        texts = {message.get("tool_call_id"): message["content"] for message in messages}
        is_answered = len(messages) == len(calls) and texts.keys() == {call["id"] for call in calls}
        if set(roles) == {"tool"} and is_answered:
            results = [
                ToolResult(texts[call["id"]], call["function"]["name"], call["id"])
                for call in calls
            ]
            return turn_tokenizer.tool_results(results, after=stop)
    except (UserError, TemplateRefusal):  # it may take the whole conversation
        return None
    return None


def assistant_message(turn: Turn, text: str, template: ChatTemplate, number: int) -> JsonObject:
    """A turn as a message. text: all that the model wrote, which is the content of a turn without calls.

    number: of the calls before it in the conversation.
    """
    if not turn.calls:
        return {"role": "assistant", "content": text}
    if turn.reasoning:
        thought = {"reasoning_content": turn.reasoning}
    else:
        thought = {}
    ids = _distinct_ids(turn.calls, template, number)
    calls = [_written(call, template, id) for call, id in zip(turn.calls, ids, strict=True)]
    return {"role": "assistant", "content": turn.content, **thought, "tool_calls": calls}


def results_of(turn: Message, texts: Sequence[str]) -> list[JsonObject]:
    """The messages that answer the calls of an assistant's message, in their order."""
    calls = turn["tool_calls"]
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": text,
        }
        for call, text in zip(calls, texts, strict=True)
    ]


def _distinct_ids(
    calls: Sequence[ToolCall | BadCall], template: ChatTemplate, number: int
) -> list[str]:
    """The calls' ids: as the model wrote them, but of equal ones the first alone; otherwise made, from `number` on."""
    written = {call.id for call in calls}
    ids: list[str] = []
    for place, call in enumerate(calls):
        id = call.id
        name = call.name or template.tool_name
        indices = count(number + place, len(calls))
        while not id or id in ids or (id in written and id != call.id):
            id = template.call_style.id_form.format(name=name, index=next(indices))
        ids.append(id)
    return ids


def _written(call: ToolCall | BadCall, template: ChatTemplate, id: str) -> JsonObject:
    if isinstance(call, ToolCall):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
    else:
        arguments = call.arguments
    function = {"name": call.name or template.tool_name, "arguments": arguments or "{}"}
    return {"id": id, "type": "function", "function": function}


def _for_template(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """With calls in the template's own style, and the name of its tool in each result."""
    names: dict[str, list[str]] = {}  # of each id: an agent's own calls may have equal ones
    shown: list[Message] = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            names |= {call["id"]: [] for call in calls}
            for call in calls:
                names[call["id"]].append(call["function"]["name"])
            message["tool_calls"] = [_styled(call, template) for call in calls]
        if message["role"] == "tool":
            of_id = names.get(message["tool_call_id"], [template.tool_name])
            message.setdefault("name", of_id.pop(0) if len(of_id) > 1 else of_id[0])
        shown.append(message)
    return shown


def _styled(call: Message, template: ChatTemplate) -> Mapping[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": call["function"]["arguments"]}  # the model's own broken ones
    return template.call_style.call(call["function"]["name"], arguments, 0, call["id"])
