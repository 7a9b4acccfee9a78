"""A tokenizer's chat template as the splice and the reader of tool calls see it: messages -> text -> tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from megarl.printable import first_line
from megarl.types import UserError
from megarl.types.json_objects import CallArguments, JsonObject, Message, ToolSchema

WHERE = "episode"
TOOLS = "episode.tools"
MARKER = "markedvalue"


@dataclass(frozen=True)
class CallStyle:
    """How a template wants the calls of a message.

    as_text: the arguments as JSON text (DeepSeek-V3) and not as a mapping (GLM, Qwen). id_form: of a call's id, from
    its {name} and its {index}; Kimi-K2 writes the name by the id alone, Mistral refuses other ids than 9 characters.
    """

    as_text: bool
    id_form: str

    def call(
        self, name: str, arguments: CallArguments, index: int, id: str | None = None
    ) -> JsonObject:
        """A call as OpenAI's message has it. id: as the model wrote it; None: by id_form."""
        if self.as_text:
            value = json.dumps(arguments, ensure_ascii=False)
        else:
            value = dict(arguments)
        return {
            "id": id or self.id_form.format(name=name, index=index),
            "type": "function",
            "function": {"name": name, "arguments": value},
        }


STYLES = tuple(
    CallStyle(as_text, id_form)
    for id_form in ("functions.{name}:{index}", "call{index:05d}")
    for as_text in (False, True)
)


class TemplateRefusal(Exception):
    """The template raised; the text is the first line of its reason."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template, and the schemas of the tools that the template is given.

    Raises UserError(episode) where the tokenizer has no chat template.
    """

    tokenizer: Any
    schemas: tuple[ToolSchema, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            hint = "use an instruct checkpoint, or add its chat_template.jinja"
            raise UserError(
                WHERE,
                "the tokenizer has no chat template, which every turn after the first needs",
                hint,
            )

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The conversation as text; prompt: with the generation prompt. Raises TemplateRefusal."""
        tools = [dict(schema) for schema in self.schemas] or None
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise any exception
            raise TemplateRefusal(first_line(error)) from error

    def ids(self, text: str) -> list[int]:
        """The tokens of a rendered text, which has its special tokens already."""
        return self.tokenizer(as_utf8(text), add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens kept."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def without_special_tokens(self, text: str) -> str:
        """The text of a tool or an environment with a space inside each special token, which would be markup else.

        As UTF-8 can hold it.
        """
        text = as_utf8(text)
        if self._special:
            return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Any special token, which ends a turn or begins a message."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        tokens = {
            *self.tokenizer.all_special_tokens,
            *(str(token) for token in added if token.special),
        }
        long = {token for token in tokens if len(token) > 1}
        if long:
            return re.compile(_longest_of(long))
        return None

    def turn(self, before: Sequence[Message], answer: Message) -> tuple[str, list[int]]:
        """(the end of the generation prompt that the message does not begin with, the message's tokens after the rest).

        By tokens and not by characters: the prompt may go on with a tag that the message has not, as DeepSeek's does,
        and both tags begin with the same character. Only where a token would reach over the end of the prompt, which a
        sampled turn cannot have, are the characters after the prompt tokenised alone. Raises TemplateRefusal.
        """
        prompt_text = self.text(before, prompt=True)
        text = self.text([*before, answer])
        prompt = self.ids(prompt_text)
        whole = self.ids(text)
        shared = num_shared(prompt, whole)
        if shared < len(prompt) and text.startswith(prompt_text):
            return "", self.ids(text.removeprefix(prompt_text))
        return self.decode(prompt[shared:]), whole[shared:]

    @cached_property
    def call_style(self) -> CallStyle:
        """The first style in which the template writes a call. Raises UserError(episode.tools) where there is none."""
        reasons = []
        for style in STYLES:
            call = style.call(self.tool_name, {"value": MARKER}, 0)
            try:
                text = self.text(
                    [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
                )
            except TemplateRefusal as refusal:
                reasons.append(f"refuses tool calls ({refusal})")
                continue
            # JSON inside JSON, and a dict's repr
            escaped = f'\\"{MARKER}'
            as_python = f"'value': '{MARKER}'"
            if MARKER in text and escaped not in text and as_python not in text:
                return style
            reasons.append("leaves tool calls out of the text without an error")
        hint = "use a model that was trained to call tools, or an episode.environment that answers with reply"
        raise UserError(TOOLS, f"the chat template {reasons[0]}", hint)

    @property
    def tool_name(self) -> str:
        """The name of the first tool, or a stand-in where there are none."""
        if self.schemas:
            return self.schemas[0]["function"]["name"]
        return "tool"


def _longest_of(texts: Collection[str]) -> str:
    """The pattern of the longest text that stands at a place.

    What texts begin with in common is tried once: with 1,000 special tokens a hostile MiB would take seconds otherwise,
    in which Python's `re` lets no other thread run.
    """
    start = os.path.commonprefix([*texts])
    rests: dict[str, set[str]] = {}
    for rest in (text.removeprefix(start) for text in texts if text != start):
        rests.setdefault(rest[0], set()).add(rest)
    if not rests:
        return re.escape(start)
    ways = "|".join(_longest_of(group) for _, group in sorted(rests.items()))
    may_end_here = "?" if start in texts else ""
    return f"{re.escape(start)}(?:{ways}){may_end_here}"


def as_utf8(text: str) -> str:
    """The text with its escape in place of half a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def has_half_pair(value: Any) -> bool:
    """Whether a text in a JSON value has half a surrogate pair. Raises RecursionError where it is nested too deep."""
    text = json.dumps(value, ensure_ascii=False)
    return text != as_utf8(text)


def user(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


def num_shared(ids: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))


def solid(text: str) -> str:
    """Without white space, which templates trim, and some tokenizers add or drop in decoding."""
    return "".join(text.split())


def first_place(stop_ids: Collection[int], ids: Sequence[int]) -> int:
    """The place of the first stop token; behind the last token where there is none."""
    return next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))
