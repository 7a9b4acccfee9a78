"""The tokens of a demonstrated conversation: those that an episode with the same turns has, made by the same splice.

A row of the data has its messages after the prompt: the assistant's turns, the results of their calls, and a user's
messages in between. The model learns from the turns alone.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from megarl.data.files import BadRow
from megarl.episodes.messages import results_of
from megarl.episodes.template import TemplateRefusal, first_place, solid
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.model.tokenizer import chat_messages
from megarl.printable import short
from megarl.types.json_objects import Message

_FORM = "write a list of messages {role, content} as in OpenAI's chats, from the first message after the prompt on"
_ORDER = "let assistants' messages alternate with a user's message or with one result for each call, and be the last"
_CALL = (
    'write a call as {"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}'
)
_TOOLS = "demonstrate the recipe's own tools only, or add the tool to episode.tools"
_TEMPLATE = "leave the row out, write its messages in a form that the chat template takes, or use another template"
_TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True)
class Demonstration:
    """A conversation for supervised steps.

    prompt_ids: up to and with the generation prompt. response_ids: what follows, up to and with the stop token of the
    last turn. sampled: of each of these, whether an episode's model samples it. text: the words of the last turn.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    sampled: list[bool]
    text: str


@dataclass(frozen=True)
class _Call:
    """A call of the data. id: the data's own, by which results name it; shown: as the chat template takes it."""

    name: str
    id: str | None
    shown: Mapping[str, Any]


def demonstrate(turn_tokenizer: TurnTokenizer, prompt: Any, messages: Any) -> Demonstration:
    """The tokens of the prompt (a text or chat messages), and of the row's messages after it.

    splice: with the schemas of the episodes' tools. Turns are rendered by the chat template, with ids of calls in its
    own style; the arguments of calls may be a JSON text or a mapping. Raises BadRow where the messages are no episode
    of these tools or the template refuses or changes them, and UserError where it takes no results or calls at all.
    """
    try:
        return _demonstrated(turn_tokenizer, chat_messages(prompt), _checked(messages))
    except TemplateRefusal as refusal:
        raise BadRow(f"the chat template refuses the messages ({refusal})", _TEMPLATE) from refusal


def _checked(messages: Any) -> Sequence[Message]:
    """The messages with contents that are texts, without keys that are null."""
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise BadRow(f"the demonstration is {short(messages, 60)}", _FORM)
    chat = [{"content": "", **message} for message in chat_messages(messages)]
    for number, message in enumerate(chat, start=1):
        if not isinstance(message["content"], str):
            content = short(message["content"], 60)
            raise BadRow(
                f"the content of message {number} of the demonstration is {content}", _FORM
            )
    if chat[-1].get("role") != "assistant":
        raise BadRow(
            f"the demonstration ends with a message of role {short(chat[-1].get('role'), 60)}",
            _ORDER,
        )
    return chat


def _demonstrated(
    turn_tokenizer: TurnTokenizer, before: Sequence[Message], messages: Sequence[Message]
) -> Demonstration:
    prompt_ids = turn_tokenizer.first(before)
    response_ids = []
    sampled = []
    chat = list(before)
    remaining = deque(messages)
    numbers = count()
    turn = []

    def append(ids: Sequence[int], *, is_sampled: bool) -> None:
        response_ids.extend(ids)
        sampled.extend([is_sampled] * len(ids))

    while remaining:
        calls, answer = _turn(turn_tokenizer, _next(remaining, "assistant"), numbers)
        turn = _whole_turn(turn_tokenizer, chat, answer, calls)
        append(turn, is_sampled=True)
        chat.append(answer)
        if remaining and calls:
            texts = [_result(call, _next(remaining, "tool")) for call in calls]
            append(_results(turn_tokenizer, calls, texts, turn), is_sampled=False)
            chat += results_of(answer, texts)
        elif remaining:
            chat.append(_next(remaining, "user"))
            append(turn_tokenizer.user(chat[-1]["content"], after=turn[-1]), is_sampled=False)
    return Demonstration(prompt_ids, response_ids, sampled, turn_tokenizer.turn_text(turn))


def _next(messages: deque[Message], role: str) -> Message:
    message = messages.popleft()
    if message.get("role") != role:
        message_role = short(message.get("role"), 60)
        raise BadRow(
            f"a message of the demonstration has role {message_role} where {role!r} must follow",
            _ORDER,
        )
    return message


def _turn(
    turn_tokenizer: TurnTokenizer, message: Message, numbers: Iterator[int]
) -> tuple[list[_Call], Message]:
    """The calls of an assistant's message, and the message in the template's style. numbers: of the calls so far."""
    data_calls = message.get("tool_calls") or []
    if not isinstance(data_calls, list):
        raise BadRow(f"the calls of a message are {short(data_calls, 60)}", _CALL)
    calls = [_call(turn_tokenizer, call, next(numbers)) for call in data_calls]
    if calls:
        shown = {"tool_calls": [call.shown for call in calls]}
    else:
        shown = {}
    return calls, {key: value for key, value in message.items() if key != "tool_calls"} | shown


def name_and_arguments(data_call: Any) -> tuple[Any, Any]:
    """Of a call in OpenAI's form, whose arguments may be their JSON text. Raises BadRow."""
    try:
        name = data_call["function"]["name"]
        arguments = data_call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRow(f"a call of the demonstration is {short(data_call, 60)}", _CALL) from None
    return name, arguments


def _call(turn_tokenizer: TurnTokenizer, data_call: Any, number: int) -> _Call:
    name, arguments = name_and_arguments(data_call)
    if not isinstance(arguments, dict):
        raise BadRow(
            f"the arguments of a call of {short(name, 60)} are {short(arguments, 60)}", _CALL
        )
    names = [schema["function"]["name"] for schema in turn_tokenizer.template.schemas]
    if name not in names:
        if names:
            known = f"the tools are {', '.join(names)}"
        else:
            known = "there are no tools"
        raise BadRow(f"the demonstration calls {short(name, 60)}, and {known}", _TOOLS)
    return _Call(
        name, data_call.get("id"), turn_tokenizer.template.call_style.call(name, arguments, number)
    )


def _result(call: _Call, message: Message) -> str:
    """The text of a call's result; the data's results stand in the order of the calls."""
    answered = message.get("tool_call_id")
    if answered and call.id and answered != call.id:
        problem = f"the demonstration has a result of {short(answered, 60)} where that of {call.id!r} must follow"
        raise BadRow(problem, _ORDER)
    return message["content"]


def _whole_turn(
    turn_tokenizer: TurnTokenizer,
    before: Sequence[Message],
    answer: Message,
    calls: Sequence[_Call],
) -> list[int]:
    """The tokens that a model samples for the message: up to and with the stop token.

    Where the stop token opens the next message (GLM) it is that of the message which follows such a turn.
    """
    template = turn_tokenizer.template
    left_out, ids = template.turn(before, answer)
    if left_out.strip():
        problem = f"the chat template writes no {left_out.strip()!r} in a turn, and the generation prompt ends with it"
        raise BadRow(problem, _TEMPLATE)
    end = first_place(turn_tokenizer.stop_ids, ids)
    words = solid(template.decode(ids[:end]))
    for part in [*_TAG.split(answer["content"]), *(call.name for call in calls)]:
        if solid(part) not in words:
            problem = f"the chat template or its tokens change the assistant's words {short(part.strip(), 60)}"
            raise BadRow(problem, _TEMPLATE)
    if end < len(ids):
        return ids[: end + 1]
    if calls:
        empty = [ToolResult("", call.name) for call in calls]
        following = turn_tokenizer.following_results(empty)
    else:
        following = turn_tokenizer.following_user("a")
    return [*ids, following.stop]


def _results(
    turn_tokenizer: TurnTokenizer,
    calls: Sequence[_Call],
    texts: Sequence[str],
    turn: Sequence[int],
) -> list[int]:
    """The tokens of the results; an id is known to an episode where the model wrote it."""
    written = turn_tokenizer.turn_text(turn)
    results = [
        ToolResult(text, call.name, call.shown["id"] if call.shown["id"] in written else None)
        for call, text in zip(calls, texts, strict=True)
    ]
    return turn_tokenizer.tool_results(results, after=turn[-1])
