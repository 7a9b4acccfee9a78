"""Bodies of requests: what is read of them, what is left out, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.environments.endpoint.request_fields import MOST_MARKS, BadField, read_body

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

BARE = {"id": "1", "type": "function", "function": {"name": "add"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [USER], **fields}).encode()


def refused(content: bytes) -> str:
    with pytest.raises(BadField) as caught:
        read_body(content)
    assert not caught.value.param or str(caught.value).startswith(caught.value.param)
    return str(caught.value)


def test_a_small_request_is_read() -> None:
    asked = read_body(body())
    assert (asked.model, asked.stream, asked.include_usage) == ("policy", False, False)
    assert (asked.chat.messages, asked.chat.tools) == ([USER], [])


def test_messages_keep_their_text_their_calls_and_nothing_else() -> None:
    """As clients send them back: with empty fields, parts of text, and the developer as the system."""
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **extras},
        {"role": "tool", "tool_call_id": "1", "content": parts, "name": "add"},
        {"role": "assistant", "content": "c", "tool_calls": None, **extras},
        USER,
    ]
    assert read_body(body(messages=messages)).chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab", "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "ab", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "c"},
        USER,
    ]


def test_tools_are_offered_unless_the_choice_is_none() -> None:
    strict = {
        "type": "function",
        "function": {**TOOL["function"], "strict": True, "description": None},
    }
    assert read_body(body(tools=[strict])).chat.tools == [TOOL]
    assert read_body(body(tools=[TOOL], tool_choice="auto")).chat.tools == [TOOL]
    assert read_body(body(tools=[TOOL], tool_choice="none")).chat.tools == ()


@pytest.mark.parametrize(
    "fields",
    [
        {
            "temperature": None,
            "top_p": None,
            "max_tokens": None,
            "max_completion_tokens": None,
            "seed": None,
        },
        {
            "user": "x",
            "metadata": {"a": "b"},
            "store": False,
            "parallel_tool_calls": True,
            "service_tier": "auto",
        },
        {
            "n": 1,
            "stop": [],
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "logprobs": False,
        },
        {"response_format": {"type": "text"}, "functions": None, "top_logprobs": None, "tools": []},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert read_body(body(**fields)) == read_body(body())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("stop", ""), ("stop", ["x", ""]), ("stop", ["x"] * 17), ("stop", "\u00e9" * 65), ("stop", [1]),
        ("stop", {}), ("max_tokens", 0), ("max_completion_tokens", True), ("max_tokens", 1.5), ("temperature", "1"),
        ("temperature", True), ("top_p", []), ("seed", 1), ("logit_bias", {"1": 2}), ("presence_penalty", 0.1),
        ("frequency_penalty", -1), ("logprobs", True), ("top_logprobs", 2),
        ("response_format", {"type": "json_object"}), ("parallel_tool_calls", False), ("store", True),
        ("tool_choice", "required"), ("modalities", ["audio"]),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}), ("functions", []), ("top_k", 1),
        ("reasoning_effort", "low"), ("prompt_token_ids", [1]), ("input_ids", [1]), ("messages", []), ("messages", 1),
        ("model", 1), ("model", None), ("stream", 1), ("stream_options", []), ("tools", {}), ("messages", None),
    ],
)  # fmt: skip
def test_what_would_change_the_samples_is_refused_by_name(name: str, value: object) -> None:
    assert refused(body(**{name: value})).startswith(f"{name} ")


def test_what_is_asked_of_the_sampling_is_read() -> None:
    """`stop` as one text or several; of two limits the smaller counts."""
    asked = read_body(
        body(stop="\n", temperature=0.5, top_p=1, max_tokens=7, max_completion_tokens=5)
    ).chat
    assert (asked.stop, asked.temperature, asked.top_p, asked.max_tokens) == (("\n",), 0.5, 1, 5)
    assert read_body(body(stop=["Observation:", "x" * 128])).chat.stop == (
        "Observation:",
        "x" * 128,
    )


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("Hi", ""), ({}, ".role"), ({"role": "function", "content": "x"}, ".role"), ({"role": ["user"]}, ".role"),
        ({**USER, "content": 1}, ".content"), ({**USER, "content": ["a"]}, ".content[0]"),
        ({**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ".content[0]"),
        ({**USER, "content": [{"type": "text"}]}, ".content[0].text"), ({**USER, "cache": {}}, ".cache"),
        ({**USER, "tool_calls": [CALL]}, ".tool_calls"), ({"role": "tool", "content": "x"}, ".tool_call_id"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls"), ({**USER, "name": 3}, ".name"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, ".tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, ".tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [BARE]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, ".audio"),
    ],
)  # fmt: skip
def test_a_bad_message_is_refused_by_its_place(message: object, where: str) -> None:
    assert refused(body(messages=[USER, message, USER])).startswith(f"messages[1]{where} ")


def test_an_image_is_refused_by_its_type() -> None:
    image = {**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "image_url" in refused(body(messages=[image]))


def test_a_bad_tool_is_refused_by_its_place() -> None:
    for tool, where in (
        ({"type": "custom"}, ".type"),
        ({"type": "function"}, ".function"),
        (1, ".type"),
    ):
        assert refused(body(tools=[TOOL, tool])).startswith(f"tools[1]{where} ")
    assert refused(body(tools=[{"type": "function", "function": {"name": 1}}])).startswith(
        "tools[0].function.name "
    )


def test_the_last_message_is_not_the_models() -> None:
    assert refused(body(messages=[USER, {"role": "assistant", "content": "x"}])).startswith(
        "messages ends"
    )


def test_options_of_a_stream() -> None:
    assert read_body(body(stream=True, stream_options={"include_usage": True})).include_usage
    assert refused(body(stream_options={"x": 1})).startswith("stream_options.x ")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"1", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a": "\\ud800"}', b"9" * 5000,
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    assert refused(content).startswith("the body is not ")


def test_a_long_text_has_room_for_as_many_marks_as_a_model_reads() -> None:
    rows = "[1,2],\n" * (MOST_MARKS // 3 - 10)
    message = {"role": "user", "content": rows}
    assert read_body(body(messages=[message])).chat.messages == [message]
    assert "more than" in refused(
        body(messages=[{"role": "user", "content": rows + "[],[],[],[]," * 10}])
    )


def test_a_pair_of_surrogates_is_text() -> None:
    smile = body(messages=[{"role": "user", "content": "\U0001f600"}])
    assert b"\\ud83d" in smile and read_body(smile).chat.messages[0]["content"] == "\U0001f600"
