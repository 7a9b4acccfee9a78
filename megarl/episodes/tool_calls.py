"""The tool calls in a turn's text, and what is wrong with those that cannot be made; no call disappears.

The text is read by the reader of SGLang whose format the model's own chat template writes (`call_probe`). Those
readers leave most broken calls out without a word, and some mend them by losing an argument: the opening tags in the
text, counted, tell how many calls the model tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator  # a requirement of Ray

from megarl.episodes.call_probe import (
    CallMarks,
    FoundFormat,
    ReasoningTags,
    find_format,
    reasoning_tags,
)
from megarl.episodes.template import TOOLS, ChatTemplate, as_utf8, has_half_pair
from megarl.episodes.tool_schemas import comparable_schema, make_validator, misfit
from megarl.types import UserError
from megarl.types.json_objects import CallArguments, ToolSchema

if TYPE_CHECKING:
    from megarl.episodes.call_parsers import CallParser, ParsedCalls

MOST_CALLS = 32  # of a turn that are read; a model that only repeats itself writes thousands
_LONGEST_REASON = 300  # characters
_UNREAD = "its form is not the one that the tools' description asks for"


@dataclass(frozen=True)
class ToolCall:
    """A call whose arguments fit the tool's schema. id: as the model wrote it, or None where the format has none."""

    name: str
    arguments: CallArguments
    id: str | None = None


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be made. reason: a sentence for the model. name, arguments: None where they cannot be read.

    In all of them half of a surrogate pair is written as its escape.
    """

    name: str | None
    reason: str
    id: str | None = None
    arguments: str | None = None


@dataclass(frozen=True)
class Turn:
    """A turn that was read: the words beside reasoning and calls, the calls in their order, and the reasoning."""

    content: str
    calls: tuple[ToolCall | BadCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls, proven on its own chat template.

    name: SGLang's name of the format. parallel: whether a turn can have several calls. why: a sentence for the user
    that says how the format was chosen.
    """

    name: str
    parallel: bool
    why: str
    marks: CallMarks
    reasoning: ReasoningTags
    reader: CallParser
    validators: Mapping[str, Draft202012Validator]

    @classmethod
    def find(
        cls, tokenizer: Any, stop_ids: Collection[int], schemas: Sequence[ToolSchema]
    ) -> CallFormat:
        """Choose the format by reading back calls that the chat template writes. Imports SGLang (seconds).

        stop_ids: the tokens at which the engine ends a response. schemas: the tools in OpenAI's form. Raises
        UserError(episode.tools): a schema is wrong, the template writes no calls, no reader gives them back.
        """
        return cls.of(find_format(tokenizer, stop_ids), tokenizer, schemas, are_users=True)

    @classmethod
    def of(
        cls,
        found_format: FoundFormat,
        tokenizer: Any,
        schemas: Sequence[ToolSchema],
        *,
        are_users: bool,
    ) -> CallFormat:
        """The format for other tools of the same tokenizer; are_users: they are the user's own, not an agent's.

        Raises UserError(episode.tools): a schema is wrong.
        """
        from megarl.episodes.call_parsers import CallParser

        tools = [comparable_schema(schema, is_users=are_users) for schema in schemas]
        validators = {tool["function"]["name"]: make_validator(tool) for tool in tools}
        if len(validators) < len(schemas):
            raise UserError(TOOLS, "two tools have the same name", "rename one of them")
        tags = reasoning_tags(ChatTemplate(tokenizer, tuple(schemas)))
        why = f"calls are read as SGLang's {found_format.name}, which gives back what the chat template writes"
        if found_format.others:
            why += (
                f" (as {', '.join(found_format.others)} would; it is the first in SGLang's table)"
            )
        reader = CallParser(found_format.name, tools, tokenizer)
        return cls(
            found_format.name,
            found_format.parallel,
            why,
            found_format.marks,
            tags,
            reader,
            validators,
        )

    def read(self, text: str, *, after_tools: bool = False) -> Turn:
        """Read a turn: its text decoded with special tokens kept, without the stop token that ended it.

        after_tools: whether the turn follows the results of tools. Calls inside the reasoning are not made. Too many
        calls for one turn, which is more than one without `parallel`, become one bad call, and none of them is made.
        """
        if after_tools:
            opened = self.reasoning.opened_after_tools
        else:
            opened = self.reasoning.opened
        reasoning, rest = self.reasoning.split(text, opened=opened)
        if rest is None:
            unclosed = _bad(
                None, f"it stands in reasoning that is not closed by {self.reasoning.closing}"
            )
            tries = self._starts(reasoning) or self.reader.read(reasoning).tries_calls
            return Turn("", (unclosed,) if tries else (), reasoning)
        starts = self._starts(rest)
        if len(starts) > MOST_CALLS:  # before the reader spends its time on them
            return Turn(self._words(rest, starts), (_too_many(len(starts)),), reasoning)
        reading = self.reader.read(rest)
        if not starts and not reading.calls and not reading.tries_calls:
            return Turn(rest.strip(), (), reasoning)
        if starts:
            words = self._words(rest, starts)
        elif reading.calls:
            words = reading.text.strip()
        else:
            words = ""
        calls = self._calls(rest, starts, reading)
        most = MOST_CALLS if self.parallel else 1
        if len(calls) > most:
            return Turn(words, (_too_many(len(calls), most),), reasoning)
        return Turn(words, self._with_ids(calls, rest), reasoning)

    def _starts(self, text: str) -> list[int]:
        """The places of the opening tags; none where the format has no such tag."""
        opening = self.marks.opening
        if opening:
            return [match.start() for match in re.finditer(re.escape(opening), text)]
        return []

    def _words(self, text: str, starts: Sequence[int]) -> str:
        """The words before the first call."""
        return text[: starts[0]].strip().removesuffix(self.marks.section or "").strip()

    def _calls(
        self, text: str, starts: Sequence[int], reading: ParsedCalls
    ) -> list[ToolCall | BadCall]:
        """All calls of the text in their order; starts: the places of the opening tags, or none."""
        if not reading.calls and not starts:
            return [self._unread(text)]
        calls = [self._checked(name, arguments) for name, arguments in reading.calls]
        inside = sum(
            _count(self.marks.opening, call.arguments)
            for call in calls
            if isinstance(call, ToolCall)
        )
        if len(calls) + inside < len(starts):
            return list(self._one_by_one(text, starts))
        if len(calls) != len(starts):  # without tags, or a tag stands in an argument
            return calls
        pieces = [text[begin:end] for begin, end in pairwise([*starts, len(text)])]
        return [
            self._checked(*call, piece) for call, piece in zip(reading.calls, pieces, strict=True)
        ]

    def _one_by_one(self, text: str, starts: Sequence[int]) -> Iterator[ToolCall | BadCall]:
        """The calls where the reader lost some: each is read alone, behind the words before the first."""
        for begin, end in pairwise([*starts, len(text)]):
            piece = text[begin:end]
            calls = self.reader.read(text[: starts[0]] + piece).calls
            yield self._checked(*calls[0], piece) if len(calls) == 1 else self._unread(piece)

    def _checked(
        self, name: str | None, arguments: str, piece: str | None = None
    ) -> ToolCall | BadCall:
        """A call that was read, if the tool exists and the arguments fit its schema.

        arguments: JSON. piece: the call's text from its opening tag on, where it is known.
        """
        validator = self.validators.get(name or "")
        if validator is None:
            return _bad(
                name,
                f"there is no such tool; the tools are {', '.join(self.validators)}",
                arguments,
            )
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _bad(name, f"the arguments are not JSON ({error})", arguments)
        if not isinstance(values, dict):
            return _bad(name, "the arguments are not a JSON object of names and values", arguments)
        if piece and (mended := self._mended(piece, values)):
            return _bad(name, mended)
        if wrong := _half_pair(values) or misfit(validator, values):
            return _bad(name, wrong, arguments)
        assert name
        return ToolCall(name, values)

    def _mended(self, piece: str, arguments: CallArguments) -> str | None:
        """What the reader passed over in a call's text: a tag that is missing or there twice."""
        if self.marks.closing and self.marks.closing not in piece:
            return f"the call is not closed by {self.marks.closing}"
        if any(
            piece.count(tag) != len(arguments) + _count(tag, arguments)
            for tag in self.marks.argument
        ):
            return "an argument is not closed, or is written twice"
        return None

    def _unread(self, piece: str) -> BadCall:
        """A call that the reader left out, with the likely reason."""
        name = re.search(
            "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in self.validators), piece
        )
        return _bad(name[0] if name else None, _json_error(piece) or _UNREAD)

    def _with_ids(
        self, calls: Sequence[ToolCall | BadCall], text: str
    ) -> tuple[ToolCall | BadCall, ...]:
        before = self.marks.before_id
        after = self.marks.after_id
        if not before or not after:
            return tuple(calls)
        ids = re.findall(rf"{re.escape(before)}\s*([\w.:\-]+)\s*{re.escape(after)}", text)
        if len(ids) != len(calls):
            return tuple(calls)
        return tuple(replace(call, id=id) for call, id in zip(calls, ids, strict=True))


def _bad(name: str | None, reason: str, arguments: str | None = None) -> BadCall:
    called = f"The call of {name}" if name else "A tool call"
    text = as_utf8(f"{called} could not be made: {reason}")
    if len(text) <= _LONGEST_REASON:
        short = text
    else:
        short = f"{text[: _LONGEST_REASON - 3]}..."
    return BadCall(name and as_utf8(name), short, arguments=arguments and as_utf8(arguments))


def _half_pair(arguments: CallArguments) -> str | None:
    """What is wrong with texts in the arguments that JSON can escape and UTF-8 cannot hold."""
    try:
        if has_half_pair(arguments):
            return "an argument has half a surrogate pair, which is no character"
        return None
    except RecursionError:
        return "the arguments are nested too deep"


def _json_error(piece: str) -> str | None:
    """What is wrong with the first JSON object in a call's text; None where it has none, or a whole one."""
    start = piece.find("{")
    if start < 0:
        return None
    try:
        json.JSONDecoder().raw_decode(piece, start)
    except (ValueError, RecursionError) as error:
        return f"its JSON is broken ({getattr(error, 'msg', error)})"
    return None


def _too_many(number: int, most: int = MOST_CALLS) -> BadCall:
    return _bad(
        None,
        f"the turn has {number} calls, and at most {most} can be made; then wait for the results",
    )


def _count(tag: str | None, value: Any) -> int:
    """How often the texts inside a JSON value have a tag."""
    num_tags = 0
    open_values = [value]
    while tag and open_values:
        part = open_values.pop()
        if isinstance(part, str):
            num_tags += part.count(tag)
        elif isinstance(part, dict | list):
            open_values += part.values() if isinstance(part, dict) else part
    return num_tags
