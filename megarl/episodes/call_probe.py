"""Which of SGLang's formats a model's own chat template writes calls in, found by reading back what it renders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.episodes.template import TOOLS, ChatTemplate, TemplateRefusal, first_place, user
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_HINT = (
    "use a checkpoint whose calls SGLang reads, or an episode.environment that answers with reply"
)
_FIRST = "probe_first"
_SECOND = "probe_second"
_WORDS = "probe words"
_TAG = r"<[^<>\s]+>"
_KEYS = "keyone", "keytwo"
_PLAIN = (_FIRST, ("valueone", "valuetwo")), (_SECOND, ("valuethree", "valuefour"))
_KINDS = {
    "text": "string",
    "empty": "string",
    "count": "integer",
    "ratio": "number",
    "nested": "object",
}
_PROBES: tuple[Mapping[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": "A value."} for key, kind in _KINDS.items()
                },
                "required": [],
            },
        },
    }
    for name in (_FIRST, _SECOND)
)
_ODD = (
    "a \"quoted\" 'word'",
    "two\nlines",
    "snow \u2603 and \u00fc",
    "{braces} [and] 1, 2",
    "back\\slash",
    "a < b & c",
)

Call = tuple[str, JsonObject]


@dataclass(frozen=True)
class CallMarks:
    """The literal text around the calls of a format, learnt from a rendering; None where the format has no such tags.

    section: the tag before the first call. opening, closing: before each call's name and after its arguments. argument:
    those that each argument has once. before_id, after_id: around a call's id, where the model writes it.
    """

    section: str | None = None
    opening: str | None = None
    closing: str | None = None
    argument: tuple[str, ...] = ()
    before_id: str | None = None
    after_id: str | None = None


@dataclass(frozen=True)
class FoundFormat:
    """name: SGLang's name. parallel: whether a turn can have several calls. others: formats that read the same."""

    name: str
    parallel: bool
    others: tuple[str, ...]
    marks: CallMarks


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around a turn's reasoning.

    opened, opened_after_tools: whether the generation prompt has the opening tag already: at the beginning and after a
    user's message, and after the results of tools.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    opened_after_tools: bool = False

    def split(self, text: str, *, opened: bool) -> tuple[str, str | None]:
        """(the reasoning, the rest) of a turn; the rest is None where the reasoning is not closed."""
        inside = text.lstrip().removeprefix(self.opening)
        if not opened and len(inside) == len(text.lstrip()):
            return "", text
        reasoning, closing, rest = inside.partition(self.closing)
        return reasoning.strip(), rest if closing else None


def find_format(tokenizer: Any, stop_ids: Collection[int]) -> FoundFormat:
    """The first format in SGLang's table that gives back the calls as rendered. Raises UserError(episode.tools)."""
    from megarl.episodes.call_parsers import FORMATS, CallParser  # imports SGLang

    template = ChatTemplate(tokenizer, _PROBES)
    tags = reasoning_tags(template)
    for number in (2, 1):
        calls = _odd_calls(template)[:number]
        try:
            text = _turn(template, stop_ids, calls)
        except TemplateRefusal:
            continue
        # DeepSeek's template opens reasoning in the prompt, and writes turns without any
        if tags.closing in text:
            text = tags.split(text, opened=tags.opened)[1] or text
        readers = [CallParser(name, _PROBES, tokenizer) for name in FORMATS]
        passed = [reader.name for reader in readers if _same(reader.read(text).calls, calls)]
        if passed:
            if number == 2:
                marks = _marks(template, stop_ids)
            else:
                marks = CallMarks()
            return FoundFormat(passed[0], number == 2, tuple(passed[1:]), marks)
    readers = f"none of SGLang's {len(FORMATS)} readers of tool calls"
    problem = f"{readers} gives back the calls that the chat template writes"
    raise UserError(TOOLS, problem, _HINT)


def reasoning_tags(template: ChatTemplate) -> ReasoningTags:
    """The tags in which the template writes a message's reasoning; <think> and </think> where it writes none."""
    thought = "probe thoughts"
    tags = ReasoningTags()
    call = template.call_style.call(template.tool_name, {"value": "b"}, 0)
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": template.tool_name,
        "content": "c",
    }
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "assistant", "content": _WORDS, "reasoning_content": thought}
    try:
        text = template.text([user("a"), answer])
        prompt = template.text([user("a")], prompt=True)
        prompt_after_tools = template.text([user("a"), called, result], prompt=True)
    except TemplateRefusal:
        return tags
    if match := re.search(rf"({_TAG}|\[\w+\])\s*{thought}\s*({_TAG}|\[/\w+\])", text):
        tags = ReasoningTags(match[1], match[2])

    def is_opened(prompt: str) -> bool:
        return prompt.rfind(tags.opening) > prompt.rfind(tags.closing)

    return ReasoningTags(
        tags.opening, tags.closing, is_opened(prompt), is_opened(prompt_after_tools)
    )


def _odd_calls(template: ChatTemplate) -> list[Call]:
    """Two calls with arguments of all kinds, in the characters that the tokenizer can write."""
    odd = [text for text in _ODD if template.decode(template.ids(text)) == text]
    return [
        (_FIRST, {"text": " ".join([_WORDS, *odd]), "count": 3, "nested": {"a": {"b": [1, "c"]}}}),
        (_SECOND, {"empty": "", "ratio": 2.5, "text": "".join(reversed(odd)) or _WORDS}),
    ]


def _turn(template: ChatTemplate, stop_ids: Collection[int], calls: Sequence[Call]) -> str:
    """A turn with these calls as the model would write it. Raises TemplateRefusal."""
    written = [
        template.call_style.call(name, arguments, index)
        for index, (name, arguments) in enumerate(calls)
    ]
    _, ids = template.turn([user("a")], {"role": "assistant", "content": "", "tool_calls": written})
    return template.decode(ids[: first_place(stop_ids, ids)])


def _same(read: Sequence[tuple[str | None, str]], calls: Sequence[Call]) -> bool:
    try:
        return [(name, json.loads(arguments)) for name, arguments in read] == list(calls)
    except ValueError:
        return False


def _marks(template: ChatTemplate, stop_ids: Collection[int]) -> CallMarks:
    """Learn the text around two calls, each with two arguments."""
    text = _turn(
        template,
        stop_ids,
        [(name, dict(zip(_KEYS, values, strict=True))) for name, values in _PLAIN],
    )
    before_first, _, rest = text.partition(_FIRST)
    before_key, _, rest = rest.partition(_KEYS[0])
    between_arguments = rest.partition(_PLAIN[0][1][0])[2].partition(_KEYS[1])[0]
    between_calls = rest.partition(_PLAIN[0][1][1])[2].partition(_SECOND)[0]
    end = rest.partition(_PLAIN[1][1][1])[2]
    before_id, after_id = _around_ids(template, text)
    opening = _tag(r"(<[^/<>\s][^<>\s]*>)", _common_end(before_first, between_calls))
    if not opening:  # JSON, where what stands before a name may stand in an argument too
        return CallMarks(before_id=before_id, after_id=after_id)
    section = _tag(rf"({_TAG})\s*$", before_first.rpartition(opening)[0])
    closing = _tag(rf"({_TAG})\s*$", _common_start(between_calls.rpartition(opening)[0], end))
    before_argument = _tag(r"(<[^<>\s]+>?)$", _common_end(before_key, between_arguments))
    after_argument = _tag(r"^\s*(</[^<>\s]+>)", _common_start(between_arguments, between_calls))
    argument = tuple(tag for tag in (before_argument, after_argument) if tag)
    return CallMarks(section, opening, closing, argument, before_id, after_id)


def _around_ids(template: ChatTemplate, text: str) -> tuple[str | None, str | None]:
    """The text before and after the ids of the two calls, where they are written."""
    ids = [
        template.call_style.id_form.format(name=name, index=index)
        for index, (name, _) in enumerate(_PLAIN)
    ]
    if not all(id in text for id in ids):
        return None, None
    (before, after), (before_second, after_second) = (text.split(id, 1) for id in ids)
    opening = _tag(rf'({_TAG}|"\w+": ")$', _common_end(before, before_second))
    closing = _tag(rf'^({_TAG}|")', _common_start(after, after_second))
    if opening and closing:
        return (opening, closing)
    return (None, None)


def _tag(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _common_start(text: str, other: str) -> str:
    return os.path.commonprefix([text, other])


def _common_end(text: str, other: str) -> str:
    return os.path.commonprefix([text[::-1], other[::-1]])[::-1]
