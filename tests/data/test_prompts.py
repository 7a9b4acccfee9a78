"""Rows of a file become prompts; whatever is wrong with them is said once, with its place."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.prompts import PromptSource, load_prompts
from megarl.data.streams import PromptStream
from megarl.model.tokenizer import chat_ids, chat_text, load_tokenizer
from megarl.types import Prompt, UserError, UserErrors

QUESTION = {"prompt": "1+2=", "answer": "3"}


def write(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def load(path: str, tokenizer: Any, limit: int = 32) -> Sequence[Prompt]:
    return load_prompts(
        PromptSource("data.train", path), tokenizer, max_prompt_tokens=limit
    ).prompts


def errors(path: str, tokenizer: Any, limit: int = 32) -> tuple[UserError, ...]:
    with pytest.raises(UserErrors) as caught:
        load(path, tokenizer, limit)
    assert all(error.where == "data.train" for error in caught.value.errors)
    return caught.value.errors


def test_a_string_becomes_one_user_message(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(write(tmp_path, [QUESTION | {"answer": 3}]), tokenizer)
    assert prompt.text == "<user>1+2=<assistant>"
    assert tuple(prompt.token_ids) == tuple(
        tokenizer.convert_tokens_to_ids(["<user>", *"1+2=", "<assistant>"])
    )
    assert prompt.answer == "3"
    assert prompt.row == QUESTION | {"answer": 3}
    assert prompt.id.endswith("rows.jsonl:1")


def test_a_dotted_name_is_of_what_lies_inside_a_column(tmp_path: Path, tokenizer: Any) -> None:
    """As in the files of DAPO-Math-17k; a column that is called so goes first."""
    row = {"prompt": "1+2=", "reward_model": {"ground_truth": "3"}}

    def answers(*rows: dict[str, Any]) -> list[str]:
        path = str(tmp_path / "rows.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        source = PromptSource("data.train", path, answer="reward_model.ground_truth")
        return [
            prompt.answer
            for prompt in load_prompts(source, tokenizer, max_prompt_tokens=32).prompts
        ]

    assert answers(row, row) == ["3", "3"]
    assert answers(row | {"reward_model.ground_truth": "4"}) == ["4"]
    with pytest.raises(
        UserErrors, match="there is no column 'ground_truth'; set data.answer to one of style"
    ):
        answers({"prompt": "1+2=", "reward_model": {"style": "rule"}})


def test_messages_keep_their_roles(tmp_path: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    (prompt,) = load(write(tmp_path, [QUESTION | {"prompt": messages}]), tokenizer)
    assert prompt.text == "<user>1<assistant>2<user>3<assistant>"


def test_without_a_template_a_string_stands_as_it_is(tmp_path: Path, plain_tokenizer: Any) -> None:
    (prompt,) = load(write(tmp_path, [QUESTION]), plain_tokenizer)
    assert prompt.text == "1+2="
    messages = write(
        tmp_path, [QUESTION | {"prompt": [{"role": "user", "content": "1"}]}], "chat.jsonl"
    )
    (error,) = errors(messages, plain_tokenizer)
    assert "no chat template" in error.problem


@pytest.mark.parametrize(
    ("row", "problem", "hint"),
    [
        ({"answer": "3"}, "no column 'prompt'", "set data.prompt to one of answer"),
        (
            {"prompt": "1", "response": "3"},
            "no column 'answer'",
            "set data.answer to one of prompt, response",
        ),
        ({"prompt": " ", "answer": "3"}, "the prompt is empty", "non-empty string"),
        ({"prompt": 5, "answer": "3"}, "the prompt is 5", "non-empty string"),
        ({"prompt": [], "answer": "3"}, "the prompt is []", "list of messages"),
        (
            {"prompt": [{"role": "user"}], "answer": "3"},
            "content of message 1 of the prompt is missing",
            "strings",
        ),
        (
            {"prompt": [[{"role": "user", "content": "1"}]], "answer": "3"},
            "message 1 of the prompt is [{",
            "messages",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}]}],
                "answer": "3",
            },
            "the content of message 1 of the prompt is [{'type'",
            "contents are strings",
        ),
        ({"prompt": "1", "answer": None}, "'answer' is None", "write a text or a number"),
        ({"prompt": "1", "answer": ""}, "'answer' is ''", "write a text or a number"),
        ({"prompt": "1", "answer": ["3"]}, "'answer' is ['3']", "write a text or a number"),
        ({"prompt": "1", "answer": math.nan}, "'answer' is nan", "write a text or a number"),
        (
            {"prompt": "1" * 40, "answer": "3"},
            "1 of the 2 prompts",
            "raise data.max_prompt_tokens to 42 or less",
        ),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, tokenizer: Any, row: Any, problem: str, hint: str
) -> None:
    (error,) = errors(write(tmp_path, [QUESTION, row]), tokenizer)
    assert "rows.jsonl:2" in error.problem
    assert problem in error.problem
    assert hint in error.hint


def test_an_empty_file_and_one_of_another_kind_are_named(tmp_path: Path, tokenizer: Any) -> None:
    for name, problem in (("rows.jsonl", "has no rows"), ("rows.csv", "neither .jsonl nor")):
        (error,) = errors(write(tmp_path, [], name), tokenizer)
        assert problem in error.problem


@pytest.mark.parametrize(
    ("folder", "problem"), [("none", "is not a folder"), ("empty", "has no usable tokenizer")]
)
def test_a_missing_tokenizer_is_the_models_fault(tmp_path: Path, folder: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=problem) as caught:
        load_tokenizer(str(tmp_path / folder))
    assert caught.value.where == "model.path"


def test_a_chat_for_a_judge(tokenizer: Any) -> None:
    """By its own template, which says where the response is; without one, text goes before text."""
    asked = [{"role": "user", "content": "1+1="}]
    assert chat_ids(tokenizer, "1+1=", "2") == chat_ids(tokenizer, asked, "2")
    text, special = chat_text(tokenizer, asked, "2")
    assert not special and "1+1=" in text and "2" in text
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None
    assert chat_text(tokenizer, "1+1=", "2") == ("1+1=2", True)
    with pytest.raises(ValueError, match="no chat template"):
        chat_text(tokenizer, asked, "2")


def numbered(count: int) -> list[Prompt]:
    return [Prompt(str(index), "", (1,), "") for index in range(count)]


@given(
    count=st.integers(1, 20),
    takes=st.lists(st.integers(0, 30), max_size=10),
    seed=st.integers(0, 99),
)
def test_every_epoch_holds_each_prompt_once(count: int, takes: list[int], seed: int) -> None:
    """In an order that the seed decides, whatever is taken at once, or skipped as already taken."""
    stream = PromptStream(numbered(count), seed)
    batches = [stream.take(n) for n in takes]
    assert [len(batch) for batch in batches] == takes
    prompts = [prompt for batch in batches for prompt in batch]
    ids = [int(prompt.id) for prompt in prompts]
    for start in range(0, len(ids) - count + 1, count):
        assert sorted(ids[start : start + count]) == list(range(count))
    again = PromptStream(numbered(count), seed)
    assert again.take(len(ids)) == prompts
    resumed = PromptStream(numbered(count), seed)
    resumed.skip_to(stream.taken)
    assert resumed.take(count + 3) == stream.take(count + 3) == again.take(count + 3)


def test_epochs_and_seeds_differ() -> None:
    stream = PromptStream(numbered(50), 1)
    first, second = stream.take(50), stream.take(50)
    assert first != second
    assert first != PromptStream(numbered(50), 2).take(50)
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], 1)
