"""Demonstrations have the tokens of an episode in which a model takes the same turns; only the turns are learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.files import BadRow
from megarl.environments.calculator import calculate
from megarl.environments.runtime.tool_loading import load_tools
from megarl.episodes.conversation import Conversation
from megarl.episodes.demonstrated_episode import Demonstration, demonstrate
from megarl.episodes.demonstrations import demonstrated_episode
from megarl.episodes.template_check import check
from megarl.episodes.tool_calls import CallFormat, ToolCall
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.model.tokenizer import load_tokenizer
from megarl.samples import accounting
from megarl.types import Prompt, UserError
from scripts import make_arithmetic, make_tiny_moe
from tests.episodes.chatml_families import CHATML, HERMES, QWEN_2_5, QWEN_3_CODER
from tests.episodes.families import TOOLS, Family, stop_ids, tokenizer_of
from tests.episodes.other_families import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    GLM_4_5,
    KIMI_K2,
    LLAMA_3_1,
    MISTRAL,
)
from tests.samples.responses import response

QUESTION, ANSWER = "how many?", "the answer is three"
CALCULATOR = load_tools(["megarl.environments.calculator:calculate"], {}).tools["calculate"].schema
Message = dict[str, Any]


def turn_tokenizer_of(family: Family) -> TurnTokenizer:
    return TurnTokenizer(tokenizer_of(family), stop_ids(family), TOOLS if family.calls else None)


def assistant(content: str | None = ANSWER, *calls: Message) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls) or None}


def call(
    expression: str = "1+2", name: str = "calc", id: str = "x", *, as_text: bool = True
) -> Message:
    arguments = {"expression": expression}
    written = json.dumps(arguments) if as_text else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}


def result(text: str, id: str | None = "x") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def parts(turn_tokenizer: TurnTokenizer, made: Demonstration) -> list[tuple[bool, str]]:
    """The response as texts that are sampled, or are not."""
    pieces: list[tuple[bool, list[int]]] = []
    for token, is_sampled in zip(made.response_ids, made.sampled, strict=True):
        if not pieces or pieces[-1][0] != is_sampled:
            pieces.append((is_sampled, []))
        pieces[-1][1].append(token)
    return [(is_sampled, turn_tokenizer.template.decode(ids)) for is_sampled, ids in pieces]


# --- the families of models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False], ids=["text", "mapping"])
@pytest.mark.parametrize(
    "family",
    [QWEN_2_5, QWEN_3_CODER, HERMES, DEEPSEEK_V3_1, LLAMA_3_1, KIMI_K2],
    ids=lambda family: family.name,
)
def test_a_call_and_its_result_are_what_the_family_writes(family: Family, *, as_text: bool) -> None:
    turn_tokenizer = turn_tokenizer_of(family)
    demonstration = demonstrate(
        turn_tokenizer,
        QUESTION,
        [assistant(None, call(as_text=as_text)), result("three"), assistant()],
    )
    assert family.calls and family.one
    # Kimi-K2 counts the calls of a conversation, and the family's example is a later one
    first_of = "functions.calc:0"
    expected = [
        (True, family.calls.replace("functions.calc:7", first_of)),
        (False, family.one.replace("functions.calc:7", first_of)),
        (True, ANSWER + family.last_stop),
    ]
    assert parts(turn_tokenizer, demonstration) == expected
    assert demonstration.prompt_ids == turn_tokenizer.first(QUESTION)
    assert demonstration.text == ANSWER


def test_a_stop_token_that_opens_the_next_message_ends_the_turn() -> None:
    turn_tokenizer = turn_tokenizer_of(GLM_4_5)
    pieces = parts(
        turn_tokenizer,
        demonstrate(
            turn_tokenizer, QUESTION, [assistant("", call()), result("three"), assistant()]
        ),
    )
    assert [is_sampled for is_sampled, _ in pieces] == [True, False, True]
    assert pieces[0][1].endswith("</tool_call><|observation|>")
    assert pieces[1][1] == GLM_4_5.one
    assert pieces[2][1].endswith(f"{ANSWER}<|user|>")


def test_results_of_one_turn_are_joined_and_calls_are_numbered_on() -> None:
    turn_tokenizer = turn_tokenizer_of(KIMI_K2)
    two = assistant("", call(id="x"), call("3+4", id="y"))
    chat = [
        two,
        result("three", "x"),
        result("seven", "y"),
        assistant("", call("5", id="z")),
        result("five", "z"),
    ]
    text = "".join(
        text
        for _, text in parts(
            turn_tokenizer, demonstrate(turn_tokenizer, QUESTION, [*chat, assistant()])
        )
    )
    assert [text.count(f"functions.calc:{number}") for number in range(4)] == [2, 2, 2, 0]
    assert text.index("three") < text.index("seven") < text.index("five")


def test_messages_of_a_user_are_not_learnt() -> None:
    turn_tokenizer = turn_tokenizer_of(CHATML)
    demonstration = demonstrate(
        turn_tokenizer,
        QUESTION,
        [assistant("two"), {"role": "user", "content": "more?"}, assistant()],
    )
    assert parts(turn_tokenizer, demonstration) == [
        (True, "two<|im_end|>"),
        (False, CHATML.user),
        (True, f"{ANSWER}<|im_end|>"),
    ]


def test_an_episode_may_end_with_a_call() -> None:
    turn_tokenizer = turn_tokenizer_of(QWEN_2_5)
    assert parts(
        turn_tokenizer, demonstrate(turn_tokenizer, QUESTION, [assistant("", call())])
    ) == [(True, QWEN_2_5.calls)]


def test_no_token_reaches_over_the_end_of_the_prompt() -> None:
    turn_tokenizer, words = turn_tokenizer_of(QWEN_2_5), "what follows?"
    demonstration = demonstrate(turn_tokenizer, QUESTION, [assistant(words)])
    whole = turn_tokenizer.template.ids(
        turn_tokenizer.template.text([{"role": "user", "content": QUESTION}, assistant(words)])
    )
    # the vocabulary has a token for "\nwhat"
    assert whole[: len(demonstration.prompt_ids)] != demonstration.prompt_ids
    assert demonstration.response_ids == [
        *turn_tokenizer.template.ids(words),
        turn_tokenizer.template.ids("<|im_end|>")[0],
    ]


# --- what cannot be a demonstration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("three", "the demonstration is 'three'"),
        ([], "the demonstration is []"),
        (["three"], "the demonstration is ['three']"),
        ([assistant(3)], "the content of message 1 of the demonstration is 3"),  # type: ignore[arg-type]
        ([assistant("", call()), result("three")], "the demonstration ends with a message of role 'tool'"),
        ([{"content": "three"}], "the demonstration ends with a message of role None"),
        ([result("three"), assistant()], "a message of the demonstration has role 'tool' where 'assistant' must"),
        ([assistant(), assistant()], "a message of the demonstration has role 'assistant' where 'user' must follow"),
        ([assistant(), result("three"), assistant()], "a message of the demonstration has role 'tool' where 'user'"),
        ([assistant("", call()), assistant()], "a message of the demonstration has role 'assistant' where 'tool' must"),
        ([assistant("", call()), result("three", "y"), assistant()], "the demonstration has a result of 'y' where"),
        ([assistant("", call(name="look"))], "the demonstration calls 'look', and the tools are calc, look_up"),
        ([assistant("", {"name": "calc"})], "a call of the demonstration is {'name': 'calc'}"),
        ([assistant("", call() | {"function": {"name": "calc", "arguments": "1+2"}})], "a call of the demonstration"),
        ([assistant("", call() | {"function": {"name": "calc", "arguments": "[]"}})], "the arguments of a call of"),
        ([assistant() | {"tool_calls": "calc"}], "the calls of a message are 'calc'"),
    ],
)  # fmt: skip
def test_messages_that_are_no_episode_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(BadRow) as caught:
        demonstrate(turn_tokenizer_of(QWEN_2_5), QUESTION, messages)
    assert caught.value.problem.startswith(problem)
    assert "\n" not in caught.value.problem + caught.value.hint


@pytest.mark.parametrize(
    ("family", "content", "problem"),
    [
        (replace(QWEN_2_5, calls=None), "", "the demonstration calls 'calc', and there are no tools"),
        (replace(HERMES, name="refusing", template="{{ raise_exception('no\nchats') }}"), "",
         r"the chat template refuses the messages \(no"),
        (MISTRAL, "I add", "changes? the assistant's words 'I add'"),
        (DEEPSEEK_V3, "", "the chat template writes no '<think>' in a turn"),
    ],
    ids=["no tools", "refusing", "left out", "reasoning"],
)  # fmt: skip
def test_a_family_that_cannot_have_the_messages_is_named(
    family: Family, content: str, problem: str
) -> None:
    messages = [assistant(content, call()), result("three"), assistant()]
    with pytest.raises(BadRow, match=problem):
        demonstrate(turn_tokenizer_of(family), QUESTION, messages)


# --- the quickstart with tools -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turn_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TurnTokenizer:
    """Of the model that scripts/make_tiny_moe.py --tools writes."""
    folder: Path = tmp_path_factory.mktemp("tools")
    make_tiny_moe.make_tokenizer(tools=True).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    return TurnTokenizer(tokenizer, [tokenizer.eos_token_id], [CALCULATOR])


def test_the_template_fits_the_turn_tokenizer_and_is_short(turn_tokenizer: TurnTokenizer) -> None:
    facts = check(turn_tokenizer, users=True, tools=True)
    assert facts.parallel and not facts.kept and not facts.notes
    assert len(turn_tokenizer.first("47*86=")) == 13


def played(
    turn_tokenizer: TurnTokenizer, prompt: str, turns: list[tuple[str, str | None]]
) -> Conversation:
    """An episode with the real calculator. turns: (the text that the model samples, the expression that it calls)."""
    conversation = Conversation(turn_tokenizer.first(prompt))
    for text, expression in turns:
        ids = turn_tokenizer.template.ids(text)
        turn = response(conversation.ids, np.asarray(ids), text=text)
        conversation.add_turn(turn)
        if expression:
            results = [ToolResult(calculate(expression), "calculate")]
            conversation.add_message(turn_tokenizer.tool_results(results, after=ids[-1]))
    return conversation


ROWS = make_arithmetic.make_tool_rows(1, 256)[0]


@given(st.sampled_from(ROWS))
def test_a_demonstration_is_the_episode_with_the_same_turns(
    turn_tokenizer: TurnTokenizer, row: dict[str, Any]
) -> None:
    demonstration = demonstrate(turn_tokenizer, row["prompt"], row["messages"])
    expression = row["prompt"].removesuffix("=")
    called = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call><eos>'
    turns: list[tuple[str, str | None]] = [(called, expression)] if len(row["messages"]) > 1 else []
    played_row = played(
        turn_tokenizer, row["prompt"], [*turns, (f"{row['answer']}<eos>", None)]
    ).row()
    assert demonstration.prompt_ids == played_row.prompt_ids
    assert demonstration.response_ids == played_row.response_ids_T.tolist()
    assert demonstration.sampled == played_row.trained_T.tolist()
    assert demonstration.text == row["answer"]


def test_a_demonstrated_episode_is_a_row_whose_turns_are_trained(
    turn_tokenizer: TurnTokenizer,
) -> None:
    row = next(row for row in ROWS if len(row["messages"]) > 1)
    demonstration = demonstrate(turn_tokenizer, row["prompt"], row["messages"])
    prompt = Prompt(
        "rows.jsonl:1", "", tuple(demonstration.prompt_ids), row["answer"], row, row["prompt"]
    )
    group = demonstrated_episode(prompt, turn_tokenizer, "messages")
    accounting.check(prompt, group.samples)
    (sample,) = group.samples
    assert sample.only_row.prompt_ids is prompt.token_ids and sample.text == row["answer"]
    assert sample.only_row.response_ids_T.tolist() == demonstration.response_ids
    assert sample.only_row.trained_T.tolist() == demonstration.sampled
    with pytest.raises(UserError, match="data.messages: rows.jsonl:1: there is no column 'chat'"):
        demonstrated_episode(prompt, turn_tokenizer, "chat")


@pytest.mark.slow  # imports SGLang
def test_demonstrated_calls_are_read_as_they_were_given(turn_tokenizer: TurnTokenizer) -> None:
    calls = CallFormat.find(
        turn_tokenizer.template.tokenizer, turn_tokenizer.stop_ids, [CALCULATOR]
    )
    assert calls.parallel and calls.name == "hermes"
    for row in ROWS[:8]:
        demonstration = demonstrate(turn_tokenizer, row["prompt"], row["messages"])
        first = (
            demonstration.response_ids[: demonstration.sampled.index(False)]
            if not all(demonstration.sampled)
            else demonstration.response_ids
        )
        expected = (ToolCall("calculate", {"expression": row["prompt"].removesuffix("=")}),)
        assert calls.read(turn_tokenizer.turn_text(first)).calls == (
            expected if len(row["messages"]) > 1 else ()
        )
