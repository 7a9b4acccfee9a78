"""How a conversation's tokens go on after a sampled turn, without code for any model family.

A conversation is a buffer of tokens that is only appended to. Its prompt is rendered by the chat template; a turn is
sampled up to and with one of the engine's stop tokens; then come the tokens that this module makes: those of the
next messages and of the next generation prompt. Nothing before is rendered or tokenised again. For that one short
conversation is rendered with a marker inside the assistant's message. What follows the marker is tokenised, and what
follows the first stop token in it is appended.

A turn that ended at an agent's stop text has no stop token: the template's own is appended, too.

Where the stop token ends the assistant's message (`<|im_end|>`) it is in the buffer already, whichever of the stop
tokens was sampled. Where it opens the next message (GLM's `<|user|>` and `<|observation|>`) the sampled token is that
opening if it is the same; if the model announced another kind of message than follows, the right opening is appended
after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.episodes.template import (
    MARKER,
    WHERE,
    ChatTemplate,
    TemplateRefusal,
    first_place,
    user,
)
from megarl.model.tokenizer import chat_messages
from megarl.types import UserError
from megarl.types.json_objects import Message, ToolSchema

HINT = "use a checkpoint with another chat template, or set episode.history to render"
_OPENING_WORDS = "a"  # of the user in a short conversation
_NAME = re.compile(r"[\w.\-]{1,128}")
_ID = re.compile(r"[\w.:\-]{1,160}")
Kind = Literal["user", "tool"]
Place = Literal["argument", "content"]
_ATTEMPTS: tuple[tuple[Place, bool], ...] = (
    ("argument", True),
    ("argument", False),
    ("content", True),
)


@dataclass(frozen=True)
class ToolResult:
    """What a call of the last turn gave, or why the call was refused.

    name, id: of the call as the model wrote it; None where they could not be read.
    """

    text: str
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Following:
    """What follows a marker in an assistant's message: the first stop token, and the tokens after it.

    text: the whole conversation that was rendered.
    """

    stop: int
    ids: list[int]
    text: str = field(compare=False)


class TurnTokenizer:
    """The tokens of a conversation's prompt, and those between its turns.

    stop_ids: the tokens at which the engine ends a response. schemas: the tools in OpenAI's form; none: no tools.
    All methods return new lists, keep no state between calls, and may run in any thread.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Collection[int],
        schemas: Sequence[ToolSchema] | None = None,
    ) -> None:
        self.template = ChatTemplate(tokenizer, tuple(schemas or ()))
        self.stop_ids = frozenset(stop_ids)
        if not self.stop_ids:
            problem = "the model has no stop token, at which a turn would end"
            raise UserError(
                WHERE, problem, "give eos_token_id in its config.json or generation_config.json"
            )
        # of each kind of message that follows a turn: whether the stop token is its first
        self._opens: dict[Kind, bool] = {}

    def first(self, prompt: Any) -> list[int]:
        """The tokens of a prompt (a text or chat messages), up to and with the generation prompt.

        Raises TemplateRefusal.
        """
        return self.template.ids(self.template.text(chat_messages(prompt), prompt=True))

    def user(self, text: str, *, after: int | None) -> list[int]:
        """The tokens to append for a user's message, up to and with the generation prompt.

        after: the stop token with which the last turn ended; None: a stop text ended it. Raises UserError(episode).
        """
        return self._joined("user", self.following_user(text), after)

    def tool_results(self, results: Sequence[ToolResult], *, after: int | None) -> list[int]:
        """The tokens to append for the results of all calls of the last turn, in the order of the calls.

        after: as of `user`. Raises UserError(episode), and (episode.tools) where the template writes no calls.
        """
        return self._joined("tool", self.following_results(results), after)

    def turn_text(self, ids: Sequence[int], stop_texts: Collection[str] = ()) -> str:
        """A sampled turn as text, special tokens kept, without the stop token or the stop text that ended it."""
        ids = list(ids)
        if stop_texts:
            whole = self.template.decode(ids)
            places = [whole.find(text) for text in stop_texts if text in whole]
            if places:
                return whole[: min(places)]
        return self.template.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def following_user(
        self,
        text: str,
        *,
        before: Sequence[Message] = (),
        shown: Message | None = None,
        marker: str = MARKER,
    ) -> Following:
        """What follows an assistant's message when a user's message answers it.

        before: more messages before the short conversation; shown: keys that replace the assistant's own. Neither
        they nor the marker change the result, which `turn_tokenizer_check` proves.
        """
        marker = _unused(marker, text)
        assistant = {"role": "assistant", "content": marker, **(shown or {})}
        chat = [*before, user(_OPENING_WORDS), assistant, user(text)]
        return self._following(chat, marker, "a user's message")

    def following_results(
        self,
        results: Sequence[ToolResult],
        *,
        before: Sequence[Message] = (),
        shown: Message | None = None,
        marker: str = MARKER,
    ) -> Following:
        """What follows an assistant's message with calls when the results of all its calls answer it.

        The marker stands in the argument of the last call, or in the content where the template leaves the former out.
        Ids that the model wrote and the template refuses are replaced. before, shown: as in `following_user`.
        """
        if not results:
            raise ValueError("a turn without calls has no results")
        if len(results) == 1:
            what = "a tool's result"
        else:
            what = f"the results of {len(results)} calls in one turn"
        marker = _unused(marker, *(result.text for result in results))
        errors = []
        for place, with_ids in _ATTEMPTS:
            chat = [*before, *self._called(results, marker, place, with_ids, shown or {})]
            try:
                return self._following(chat, marker, what)
            except UserError as error:
                errors.append(error)
        raise errors[0]

    def _called(
        self,
        results: Sequence[ToolResult],
        marker: str,
        place: Place,
        with_ids: bool,
        shown: Message,
    ) -> list[Message]:
        """A short conversation in which each result answers its own call."""
        style = self.template.call_style
        names = [_safe(_NAME, result.name) or self.template.tool_name for result in results]
        last = len(results) - 1
        calls = []
        for index, (name, result) in enumerate(zip(names, results, strict=True)):
            if place == "argument" and index == last:
                value = marker
            else:
                value = "b"
            calls.append(
                style.call(
                    name, {"value": value}, index, _safe(_ID, result.id) if with_ids else None
                )
            )
        content = marker if place == "content" else ""
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result.text}
            for call, name, result in zip(calls, names, results, strict=True)
        ]
        assistant = {"role": "assistant", "content": content, **shown, "tool_calls": calls}
        return [user(_OPENING_WORDS), assistant, *answers]

    def _following(self, chat: Sequence[Message], marker: str, what: str) -> Following:
        try:
            text = self.template.text(chat, prompt=True)
        except TemplateRefusal as refusal:
            raise UserError(
                WHERE, f"the chat template refuses {what} ({refusal})", HINT
            ) from refusal
        if text.count(marker) != 1:
            if marker not in text:
                times = "leaves the assistant's words out"
            else:
                times = "writes the assistant's words twice"
            raise UserError(WHERE, f"the chat template {times} before {what}", HINT)
        ids = self.template.ids(text.partition(marker)[2])
        place = first_place(self.stop_ids, ids)
        if place == len(ids):
            stops = self.template.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
            names = ", ".join(map(str, stops))
            problem = f"the chat template writes none of the model's stop tokens ({names}) between a turn and {what}"
            raise UserError(WHERE, problem, HINT)
        return Following(ids[place], ids[place + 1 :], text)

    def _joined(self, kind: Kind, following: Following, after: int | None) -> list[int]:
        if after is None:
            return [following.stop, *following.ids]
        if after not in self.stop_ids:
            raise ValueError(
                f"token {after} ends no turn: the stop tokens are {sorted(self.stop_ids)}"
            )
        if kind not in self._opens:
            self._opens[kind] = self._ends_without_stop(kind)
        if after == following.stop or not self._opens[kind]:
            return following.ids
        return [following.stop, *following.ids]

    def _ends_without_stop(self, kind: Kind) -> bool:
        """Whether a conversation that ends with a turn has no stop token, since it is the next message's first."""
        chat: Sequence[Message] = [user(_OPENING_WORDS), {"role": "assistant", "content": MARKER}]
        if kind == "tool":
            chat = self._called([ToolResult("")], MARKER, "argument", False, {})[:2]
        try:
            ending = self.template.text(chat).partition(MARKER)[2]
        except TemplateRefusal:  # it wants an answer to a call, or a user's message at the end
            return False
        return self.stop_ids.isdisjoint(self.template.ids(ending))


def _unused(marker: str, *texts: str) -> str:
    """A marker that is in none of the texts."""
    while any(marker in text for text in texts):
        marker += "x"
    return marker


def _safe(form: re.Pattern[str], text: str | None) -> str | None:
    """A name or id that the model wrote, or None where it could hold a part of the template's own markup."""
    if text and form.fullmatch(text):
        return text
    return None
