"""Conversations that are only appended to: every family's tokens are what its documentation says, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.episodes.template import TemplateRefusal
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.types import UserError
from tests.episodes.chatml_families import CHATML, CHATML_FAMILIES, HERMES, QWEN_2_5, QWEN_3
from tests.episodes.families import TOOLS, Family, stop_id, stop_ids, tokenizer_of
from tests.episodes.other_families import (
    DEEPSEEK_V3,
    GLM_4_5,
    GPT_OSS,
    KIMI_K2,
    MISTRAL,
    OTHER_FAMILIES,
)

FAMILIES = (*CHATML_FAMILIES, *OTHER_FAMILIES)
ANSWER = "the answer is three"


def turn_tokenizer_of(family: Family) -> TurnTokenizer:
    return TurnTokenizer(tokenizer_of(family), stop_ids(family), TOOLS if family.calls else None)


def sampled(family: Family, text: str) -> list[int]:
    return tokenizer_of(family)(text, add_special_tokens=False)["input_ids"]


def results(family: Family, number: int) -> list[ToolResult]:
    """The results of calc, with the ids that the family's model has written."""
    ids = {KIMI_K2.name: "functions.calc:{}", MISTRAL.name: "abcdefgh{}"}.get(family.name)
    return [
        ToolResult(text, "calc", ids.format(index + 7) if ids else None)
        for index, text in enumerate(("three", "four")[:number])
    ]


def appended(family: Family, number: int) -> str:
    after = sampled(family, family.calls or "")[-1]
    return tokenizer_of(family).decode(
        turn_tokenizer_of(family).tool_results(results(family, number), after=after)
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_conversation_is_what_an_append_only_conversation_must_be(family: Family) -> None:
    turn_tokenizer, tokenizer = turn_tokenizer_of(family), tokenizer_of(family)
    buffer = turn_tokenizer.first("how many?")
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "how many?"}],
        tools=list(TOOLS) if family.calls else None,
        tokenize=False,
        add_generation_prompt=True,
    )
    for number, text in ((1, family.one), (2, family.two), (1, family.one)):
        if text and family.calls:
            turn = sampled(family, family.calls)
            buffer += [*turn, *turn_tokenizer.tool_results(results(family, number), after=turn[-1])]
            expected += family.calls + text
    if family.user:
        for _ in range(2):
            turn = sampled(family, ANSWER + family.last_stop)
            buffer += [*turn, *turn_tokenizer.user("more?", after=turn[-1])]
            expected += ANSWER + family.last_stop + expected_user(family)
    assert tokenizer.decode(buffer) == expected


def expected_user(family: Family) -> str:
    """Mistral's template writes the tools again before the last message of a user."""
    user = str(family.user)
    if family is not MISTRAL:
        return user
    return tokenizer_of(family).apply_chat_template(
        [{"role": "user", "content": "more?"}], tools=list(TOOLS), tokenize=False
    ).removeprefix("<s>")  # fmt: skip


def test_calls_that_each_end_with_a_stop_token_are_not_repeated() -> None:
    """As in the first template of DeepSeek-V3."""
    ended = QWEN_3.template.replace("{{ '}\n</tool_call>' }}", "{{ '}\n</tool_call><|im_end|>' }}")
    assert ended != QWEN_3.template
    assert appended(replace(QWEN_3, name="ended", template=ended), 2) == "<|im_end|>" + str(
        QWEN_3.two
    )


def test_whichever_stop_token_was_sampled_the_one_that_closes_a_turn_is_not_repeated() -> None:
    turn_tokenizer = turn_tokenizer_of(QWEN_2_5)
    ended = [turn_tokenizer.user("more?", after=stop_id(QWEN_2_5, stop)) for stop in QWEN_2_5.stops]
    assert tokenizer_of(QWEN_2_5).decode(ended[0]) == QWEN_2_5.user
    assert ended[0] == ended[1]


@pytest.mark.parametrize(
    ("stop", "user", "results"),
    [
        # it is the message's own opening, or announced another message
        ("<|user|>", "", "<|observation|>"),
        ("<|observation|>", "<|user|>", ""),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ],
)
def test_a_stop_token_that_opens_the_next_message_stays_and_is_written_once(
    stop: str, user: str, results: str
) -> None:
    turn_tokenizer, tokenizer, after = (
        turn_tokenizer_of(GLM_4_5),
        tokenizer_of(GLM_4_5),
        stop_id(GLM_4_5, stop),
    )
    assert tokenizer.decode(turn_tokenizer.user("more?", after=after)) == f"{user}{GLM_4_5.user}"
    assert (
        tokenizer.decode(turn_tokenizer.tool_results([ToolResult("three")], after=after))
        == f"{results}{GLM_4_5.one}"
    )


def test_a_turn_that_did_not_end_cannot_be_followed() -> None:
    with pytest.raises(ValueError, match="ends no turn"):
        turn_tokenizer_of(CHATML).user("more?", after=0)
    with pytest.raises(ValueError, match="without calls"):
        turn_tokenizer_of(QWEN_3).tool_results([], after=stop_id(QWEN_3, "<|im_end|>"))


def test_a_tokenizer_without_template_or_stop_tokens_is_refused() -> None:
    bare = replace(CHATML, name="bare", template="")
    with pytest.raises(UserError, match="episode: the tokenizer has no chat template"):
        turn_tokenizer_of(bare)
    with pytest.raises(UserError, match="episode: the model has no stop token"):
        TurnTokenizer(tokenizer_of(CHATML), [])


def test_what_a_template_does_not_take_as_a_prompt_is_told() -> None:
    picky = replace(CHATML, name="picky", template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        turn_tokenizer_of(picky).first(
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        )


def test_ids_that_the_template_refuses_are_replaced() -> None:
    after = stop_id(MISTRAL, "</s>")
    ids = turn_tokenizer_of(MISTRAL).tool_results(
        [ToolResult("three", "calc", "short")], after=after
    )
    assert tokenizer_of(MISTRAL).decode(ids) == str(MISTRAL.one).replace("abcdefgh7", "call00000")


@pytest.mark.parametrize("name", ["<|im_end|>", "calc\n", "", None])
def test_a_name_that_the_model_made_up_writes_no_markup(name: str | None) -> None:
    """Of a call that could not be made; Kimi writes ids and gpt-oss names into the results."""
    for family in (KIMI_K2, GPT_OSS):
        turn_tokenizer, after = turn_tokenizer_of(family), stop_id(family, family.stops[0])
        ids = turn_tokenizer.tool_results(
            [ToolResult("three", name, f"{name}<|im_end|>")], after=after
        )
        assert ids == turn_tokenizer.tool_results([ToolResult("three", "calc")], after=after)


def test_the_text_of_a_turn_has_its_special_tokens_and_not_its_stop_token() -> None:
    turn = sampled(QWEN_3, str(QWEN_3.calls))
    assert turn_tokenizer_of(QWEN_3).turn_text(turn) == str(QWEN_3.calls).removesuffix("<|im_end|>")
    assert turn_tokenizer_of(QWEN_3).turn_text(turn[:-1]) == turn_tokenizer_of(QWEN_3).turn_text(
        turn
    )


@given(
    family=st.sampled_from([QWEN_2_5, QWEN_3, HERMES, DEEPSEEK_V3, KIMI_K2, GLM_4_5]),
    texts=st.lists(
        st.text(alphabet=st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=3
    ),
)
def test_any_text_is_appended_whole_and_in_order(family: Family, texts: list[str]) -> None:
    """Its bytes stand in the appended tokens, whose beginning and end do not depend on it."""
    turn_tokenizer, tokenizer = turn_tokenizer_of(family), tokenizer_of(family)
    after = sampled(family, str(family.calls))[-1]
    ids = turn_tokenizer.tool_results([ToolResult(text, "calc") for text in texts], after=after)
    plain = turn_tokenizer.tool_results(
        [ToolResult(f"<{index}>", "calc") for index in range(len(texts))], after=after
    )
    pieces = re.split(r"<\d>", tokenizer.decode(plain))
    assert tokenizer.decode(ids) == "".join(
        part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair
    )
    user = turn_tokenizer.user(texts[0], after=after)
    assert tokenizer.decode(user).count(texts[0]) >= 1
    assert sampled(family, tokenizer.decode(user)) == user


@given(text=st.text(max_size=60))
def test_the_marker_is_never_taken_from_the_text(text: str) -> None:
    turn_tokenizer, after = turn_tokenizer_of(QWEN_3), stop_id(QWEN_3, "<|im_end|>")
    text = f"{text}markedvalue{text}markedvaluex"
    assert text in tokenizer_of(QWEN_3).decode(turn_tokenizer.user(text, after=after))
    assert text in tokenizer_of(QWEN_3).decode(
        turn_tokenizer.tool_results([ToolResult(text)], after=after)
    )
