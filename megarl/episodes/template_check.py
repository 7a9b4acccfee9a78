"""The proof that the splice fits a chat template, and what an append-only conversation keeps that the template drops.

For preflight: a few dozen renderings of short conversations, milliseconds, without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.episodes.template import (
    MARKER,
    WHERE,
    ChatTemplate,
    TemplateRefusal,
    num_shared,
    solid,
    user,
)
from megarl.episodes.turn_tokenizer import HINT, Following, ToolResult, TurnTokenizer
from megarl.types import UserError
from megarl.types.json_objects import Message

_WORDS = "probeone", "probetwo"  # in small letters, which the vocabularies of tiny models have too
_MARKERS = (MARKER, "marked in words", MARKER * 9)
_REASONING = "thoughtful"
_THOUGHTS: tuple[dict[str, str], ...] = (
    {"reasoning_content": _REASONING},
    {"thinking": _REASONING},
)
_EARLIER: tuple[Message, ...] = (
    user("a"), {"role": "assistant", "content": "b"}, user("c"), {"role": "assistant", "content": "d"}
)  # fmt: skip


@dataclass(frozen=True)
class TemplateFacts:
    """What is so with a template and is no fault.

    parallel: whether the results of several calls in one turn can follow it. kept: what a conversation that is only
    appended to keeps of earlier turns, and the template would leave out or change. notes: sentences for the user.
    """

    parallel: bool
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def check(turn_tokenizer: TurnTokenizer, *, users: bool, tools: bool) -> TemplateFacts:
    """Prove the splice on the tokenizer's own template. Raises UserError(episode), (episode.tools).

    users, tools: whether the episodes have messages of a user after a turn, and results of tools.
    """
    notes: list[str] = []
    if users:
        _prove(
            turn_tokenizer,
            "a user's message",
            _WORDS[:1],
            partial(turn_tokenizer.following_user, _WORDS[0]),
        )
        if _repeats_tools(turn_tokenizer):
            notes.append("the chat template writes the tools again before each message of a user")
    parallel = False
    if tools:
        _prove_results(turn_tokenizer, 1)
        try:
            _prove_results(turn_tokenizer, 2)
            parallel = True
        except UserError as error:
            notes.append(f"a turn can have one call only: {error.problem}")
    kept: list[str] = []
    for occurs, what, answers in (
        (users, "a user's message", False),
        (tools, "a tool's result", True),
    ):
        if occurs:
            kept += [f"{part} after {what}" for part in _kept(turn_tokenizer.template, answers)]
    return TemplateFacts(parallel, tuple(kept), tuple(notes))


def _prove_results(turn_tokenizer: TurnTokenizer, number: int) -> None:
    template = turn_tokenizer.template
    if number == 1:
        what = "a tool's result"
    else:
        what = "the results of two calls"
    texts = _WORDS[:number]
    results = [ToolResult(text, template.tool_name) for text in texts]
    _prove(turn_tokenizer, what, texts, partial(turn_tokenizer.following_results, results))
    values = [f"{MARKER}{text}" for text in texts]
    calls = [
        template.call_style.call(template.tool_name, {"value": value}, i)
        for i, value in enumerate(values)
    ]
    shown = template.text([user("a"), {"role": "assistant", "content": "", "tool_calls": calls}])
    if missing := sum(value not in shown for value in values):
        raise UserError(
            WHERE, f"the chat template leaves out {missing} of {number} calls in one turn", HINT
        )


def _prove(
    turn_tokenizer: TurnTokenizer,
    what: str,
    texts: Sequence[str],
    following: Callable[..., Following],
) -> None:
    """Prove the splice for one kind of message, whose texts are given; following: the splice's own function for it."""
    template = turn_tokenizer.template
    plain = following()

    def error(problem: str) -> UserError:
        return UserError(WHERE, f"the chat template {problem}", HINT)

    text = template.decode(plain.ids)
    for word in texts:
        if text.count(word) != 1:
            raise error(f"writes the text of {what} {text.count(word)} times after the stop token")
    if sorted(texts, key=text.index) != list(texts):
        raise error(f"changes the order of {what}")
    for marker in _MARKERS:
        if following(marker=marker) != plain:
            raise error(f"writes {what} differently after other words of the assistant")
    if following(before=_EARLIER) != plain:
        raise error(f"writes {what} differently in a longer conversation")
    for thought in _THOUGHTS:
        if _shown_with(following, thought) not in (None, plain):
            raise error(f"writes {what} differently after a turn with reasoning")
    tokens = [plain.stop, *plain.ids]
    if template.ids(plain.text)[-len(tokens) :] != tokens:
        raise error(f"gives {what} other tokens after other text")
    if not solid(plain.text).endswith(solid(template.decode(tokens))):
        raise error(f"writes {what} in characters that are not in the vocabulary")


def _shown_with(following: Callable[..., Following], thought: Message) -> Following | None:
    """None where the template refuses the key for reasoning, or shows the reasoning in place of the words."""
    try:
        return following(shown=thought)
    except UserError:
        return None


def _repeats_tools(turn_tokenizer: TurnTokenizer) -> bool:
    after = turn_tokenizer.template.decode(turn_tokenizer.following_user(_WORDS[0]).ids)
    return bool(turn_tokenizer.template.schemas) and turn_tokenizer.template.tool_name in after


def _kept(template: ChatTemplate, answers_call: bool) -> list[str]:
    """What the template drops from a turn once a user's message, or a tool's result, follows it."""
    called: Message = {}
    result: Message = {}
    if answers_call:
        call = template.call_style.call(template.tool_name, {"value": "a"}, 0)
        called = {"tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": template.tool_name}

    def texts(content: str, **keys: str) -> tuple[str, str]:
        """The conversation that ends with the turn, and with what follows the turn; empty where it is refused."""
        chat = [user("a"), {"role": "assistant", "content": content, **keys, **called}]
        follows = {**user(_WORDS[0]), **result}
        return _text_or_nothing(template, chat), _text_or_nothing(template, [*chat, follows])

    thoughts = [texts("words", **thought) for thought in _THOUGHTS]
    thoughts.append(texts(f"<think>\n{_REASONING}\n</think>\n\nwords"))
    shown = [followed for last, followed in thoughts if _REASONING in last]
    kept = []
    if not shown or _REASONING not in shown[0]:
        kept.append("the reasoning of a turn")
    _, followed = texts("words")
    if "words" not in followed:
        kept.append("the words beside a call")
    elif "\n words \n" not in texts("\n words \n")[1]:
        kept.append("white space around the words of a turn")
    kept += _changed_prompt(template, followed)
    return kept


def _changed_prompt(template: ChatTemplate, followed: str) -> list[str]:
    """What of the prompt the template writes otherwise once a turn and a message have followed it."""
    question = [user("a")]
    prompt = template.ids(_text_or_nothing(template, question, True))
    history = template.ids(followed)
    shared = num_shared(prompt, history)
    if shared == len(prompt):
        return []
    if shared < len(template.ids(_text_or_nothing(template, question))):
        # Mistral's tools go on to the last message of a user
        return ["the beginning of the conversation"]
    return [f"the generation prompt's {template.decode(prompt[shared:])!r}"]


def _text_or_nothing(template: ChatTemplate, chat: Sequence[Message], prompt: bool = False) -> str:
    try:
        return template.text(chat, prompt=prompt)
    except TemplateRefusal:
        return ""
