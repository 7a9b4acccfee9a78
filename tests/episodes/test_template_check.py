"""The proof that the splice fits a template: a drifting template is named in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megarl.episodes.template_check import TemplateFacts, check
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.types import UserError
from tests.episodes.chatml_families import (
    CHATML,
    CHATML_FAMILIES,
    CHATML_PROMPT,
    QWEN_2_5,
    QWEN_3,
    QWEN_CALLS,
)
from tests.episodes.families import TOOLS, Family, stop_ids, tokenizer_of
from tests.episodes.other_families import GPT_OSS, LLAMA_3_1, MISTRAL, OTHER_FAMILIES

FAMILIES = {family.name: family for family in (*CHATML_FAMILIES, *OTHER_FAMILIES)}
REASONING, SPACE = "the reasoning of a turn", "white space around the words of a turn"
USER, RESULT = " after a user's message", " after a tool's result"


def facts_of(family: Family, *, users: bool = False, tools: bool = False) -> TemplateFacts:
    turn_tokenizer = TurnTokenizer(
        tokenizer_of(family), stop_ids(family), TOOLS if family.calls else None
    )
    return check(turn_tokenizer, users=users, tools=tools)


def error_of(family: Family, *, users: bool = False, tools: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        facts_of(family, users=users, tools=tools)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("chatml", []),
        ("qwen2.5", []),
        ("qwen3", [REASONING]),
        ("qwen3-thinking", [REASONING, r"the generation prompt's '<think>\n'"]),
        ("qwen3-coder", []),
        ("hermes", []),
        ("nemotron", [REASONING, SPACE, r"the generation prompt's '\n'"]),
        ("deepseek-v3", [REASONING, r"the generation prompt's '<think>\n'"]),
        ("deepseek-v3.1", [REASONING]),
        ("kimi-k2", []),
        ("glm-4.5", [REASONING, SPACE]),
        ("llama-3.1", [SPACE]),
        ("llama-3", [SPACE]),
        ("mistral", ["the beginning of the conversation"]),
    ],
)
def test_messages_of_users_are_proven_and_what_is_kept_before_them_is_told(
    name: str, kept: list[str]
) -> None:
    facts = facts_of(FAMILIES[name], users=True)
    assert facts.kept == tuple(part + USER for part in kept)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("qwen2.5", []),
        ("qwen3", []),
        ("qwen3-thinking", [r"the generation prompt's '<think>\n'"]),
        ("qwen3-coder", []),
        ("hermes", []),
        ("nemotron", [SPACE, r"the generation prompt's '\n'"]),
        ("deepseek-v3", [r"the generation prompt's '<think>\n'"]),
        ("deepseek-v3.1", [REASONING]),
        ("kimi-k2", []),
        ("glm-4.5", [SPACE]),
        ("mistral", [REASONING, "the words beside a call"]),
    ],
)
def test_results_of_tools_are_proven_and_what_is_kept_before_them_is_told(
    name: str, kept: list[str]
) -> None:
    assert facts_of(FAMILIES[name], tools=True) == TemplateFacts(
        True, tuple(part + RESULT for part in kept), ()
    )


@pytest.mark.parametrize(
    ("family", "note"),
    [
        (
            LLAMA_3_1,
            "the chat template refuses the results of 2 calls in one turn (only one call at once)",
        ),
        (GPT_OSS, "the chat template leaves out 1 of 2 calls in one turn"),
    ],
    ids=["refused", "left_out"],
)
def test_a_template_for_one_call_a_turn_is_limited_to_one(family: Family, note: str) -> None:
    facts = facts_of(family, tools=True)
    assert not facts.parallel
    assert facts.notes == (f"a turn can have one call only: {note}",)


def test_a_template_that_writes_the_tools_again_is_told() -> None:
    (note,) = facts_of(MISTRAL, users=True, tools=True).notes
    assert note == "the chat template writes the tools again before each message of a user"


def test_a_template_without_the_models_stop_token_is_refused() -> None:
    assert error_of(GPT_OSS, users=True) == (
        "episode: the chat template writes none of the model's stop tokens (<|endoftext|>, <|return|>, <|call|>) "
        "between a turn and a user's message; "
        "use a checkpoint with another chat template, or set episode.history to render"
    )


def chatml(words: str) -> Family:
    """ChatML with another text for the words of a message, as Jinja."""
    template = (
        "{% for m in messages %}{% set before = messages[loop.index0 - 1] if loop.index0 else {} %}"
        "<|im_start|>{{ m.role + '\n' }}" + words + "<|im_end|>\n{% endfor %}" + CHATML_PROMPT
    )
    return replace(CHATML, name=words, template=template)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "{{ m.content }}{{ m.content if m.role == 'user' }}",
            "writes the text of a user's message 2 times after",
        ),
        (
            "{{ m.content if m.role == 'assistant' }}",
            "writes the text of a user's message 0 times after",
        ),
        (
            "{{ m.content * 2 if m.role == 'assistant' else m.content }}",
            "writes the assistant's words twice before",
        ),
        (
            "{{ m.content if m.role == 'user' }}",
            "leaves the assistant's words out before a user's message",
        ),
        (
            "{{ m.content }}{{ before.content | length }}",
            "writes a user's message differently after other words",
        ),
        (
            "{{ m.content }}{{ loop.index }}",
            "writes a user's message differently in a longer conversation",
        ),
        (
            "{{ m.content }}{{ before.reasoning_content }}",
            "writes a user's message differently after a turn with",
        ),
        (
            "{{ raise_exception('never') if loop.index > 2 }}{{ m.content }}",
            "refuses a user's message (never)",
        ),
    ],
)
def test_a_drifting_template_is_named(words: str, problem: str) -> None:
    assert facts_of(chatml("{{ m.content }}"), users=True).notes == ()
    assert f"episode: the chat template {problem}" in error_of(chatml(words), users=True)


def test_results_in_another_order_are_refused_as_parallel_results() -> None:
    backwards = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role + '\n' + m.content }}" + QWEN_CALLS
        + "<|im_end|>\n{% endfor %}{% for m in messages | reverse if m.role == 'tool' %}"
        "<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% endfor %}" + CHATML_PROMPT
    )  # fmt: skip
    (note,) = facts_of(replace(QWEN_2_5, name="backwards", template=backwards), tools=True).notes
    assert (
        note
        == "a turn can have one call only: the chat template changes the order of the results of two calls"
    )


def test_what_stands_before_the_turn_may_change_with_the_conversation() -> None:
    counted = replace(QWEN_3, name="counted", template="{{ messages | length }}" + QWEN_3.template)
    facts = facts_of(counted, tools=True)
    assert facts == TemplateFacts(True, ("the beginning of the conversation" + RESULT,), ())


def test_characters_outside_the_vocabulary_are_told(tokenizer: Any) -> None:
    turn_tokenizer = TurnTokenizer(
        with_template(tokenizer, "<user>{}<eos>\n"), [tokenizer.eos_token_id]
    )
    with pytest.raises(
        UserError, match="writes a user's message in characters that are not in the vocabulary"
    ):
        check(turn_tokenizer, users=True, tools=False)
    assert check(
        TurnTokenizer(with_template(tokenizer, "<user>{}<eos>"), [tokenizer.eos_token_id]),
        users=True,
        tools=False,
    )


def with_template(tokenizer: Any, message: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    start, _, end = message.partition("{}")
    changed.chat_template = (
        f"{{% for m in messages %}}{start}{{{{ m.content }}}}{end}{{% endfor %}}"
    )
    return changed


def test_a_stop_token_that_merges_with_the_turns_text_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz !")}
    tokenizer = Tokenizer(models.BPE({**letters, "e!": len(letters)}, [("e", "!")]))
    tokenizer.decoder = decoders.Fuse()
    fast: Callable[..., Any] = PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    with pytest.raises(UserError, match="gives a user's message other tokens after other text"):
        check(TurnTokenizer(wrapped, [letters["!"]]), users=True, tools=False)
