"""What is taken down of an episode is JSON of a bounded size, whatever is said in it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.environments.runtime.results import CallResult
from megarl.episodes.tool_calls import BadCall, ToolCall
from megarl.episodes.transcript import LONGEST_TEXTS, MOST_BYTES, TranscriptWriter
from megarl.printable import json_line
from megarl.types import Transcript

TEXTS = st.text(max_size=20).flatmap(
    lambda text: st.integers(0, 2000).map(lambda count: text * count)
)


def with_call(arguments: Any, result: str = "4") -> Transcript:
    writer = TranscriptWriter()
    writer.add_turn("a call")
    writer.add_calls([ToolCall("double", arguments)], [CallResult(result)], [result])
    return writer.transcript()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_turns_messages_calls_and_rewards_are_in_their_order() -> None:
    writer = TranscriptWriter()
    writer.add_message("begin")
    writer.add_turn("I call")
    calls = [
        ToolCall("double", {"number": 2}),
        BadCall("halve", "no such tool"),
        ToolCall("double", {"number": 9}),
    ]
    texts = ["4", "no such tool", "9 is odd"]
    results = [CallResult(text) for text in texts[:2]] + [CallResult(texts[2], error="raised")]
    writer.add_calls(calls, results, texts)
    writer.add_reward(0.5)
    writer.add_turn("4")
    writer.add_reward(1.0)
    writer.add_reward(0.25)
    assert writer.transcript() == (
        {"role": "user", "text": "begin", "calls": [], "reward": 0.0},
        {
            "role": "assistant",
            "text": "I call",
            "calls": [
                {"name": "double", "arguments": {"number": 2}, "result": "4", "error": None},
                {"name": "halve", "arguments": None, "result": "no such tool", "error": "bad_call"},
                {
                    "name": "double",
                    "arguments": {"number": 9},
                    "result": "9 is odd",
                    "error": "raised",
                },
            ],
            "reward": 0.5,
        },
        {"role": "assistant", "text": "4", "calls": [], "reward": 1.25},
    )


def test_of_a_long_text_the_middle_is_left_out() -> None:
    writer = TranscriptWriter()
    writer.add_turn("a" * 3000 + "b" * 3000)
    (entry,) = writer.transcript()
    assert entry["text"] == f"{'a' * 2000}\n[... 2000 characters left out ...]\n{'b' * 2000}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2, 2),
        (nested(10), nested(10)),
        (nested(100), "[arguments nested in 101 levels]"),
        (math.nan, '{"value": NaN}'),
        ("x" * 5000, None),
    ],
    ids=["number", "nested", "deep", "nan", "long"],
)
def test_arguments_are_kept_as_values_where_all_that_read_them_can(value: Any, shown: Any) -> None:
    (entry,) = with_call({"value": value})
    arguments = entry["calls"][0]["arguments"]
    if shown is None:
        assert (
            isinstance(arguments, str)
            and arguments.startswith('{"value": "xxx')
            and arguments.endswith('xxx"}')
        )
        assert "characters left out" in arguments and len(arguments) < LONGEST_TEXTS[0] + 50
    else:
        assert arguments == (shown if isinstance(shown, str) else {"value": shown})


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 8)), min_size=1, max_size=40))
@example(texts=[("words " * 3000, "result " * 3000, 8)] * 40)  # too much
def test_a_transcript_has_its_size_whatever_is_said(texts: list[tuple[str, str, int]]) -> None:
    """Its ends are there, and it is one line of JSON that reads back."""
    writer = TranscriptWriter()
    for text, result, count in texts:
        writer.add_turn(text)
        writer.add_calls(
            [ToolCall("say", {"words": text})] * count,
            [CallResult(result)] * count,
            [result] * count,
        )
        writer.add_message(result)
    entries = writer.transcript()
    assert len(json.dumps(entries)) < 1.1 * MOST_BYTES, "and the line about what is left out"
    assert json.loads(json_line(entries)) == list(entries)
    left_out = [entry for entry in entries if entry["role"] == "left_out"]
    assert len(entries) == 2 * len(texts) if not left_out else len(left_out) == 1
    assert (entries[0]["role"], entries[-1]["role"]) == ("assistant", "user")


WORDS = st.text(max_size=3).flatmap(
    lambda text: st.sampled_from([1, 60, 1500]).map(lambda count: text * count)
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.one_of(WORDS, st.integers(), st.floats(), st.integers(0, 30).map(nested)),
)
STEPS = st.tuples(
    WORDS,
    st.lists(st.tuples(ARGUMENTS, WORDS), max_size=2),
    st.floats(-1, 1),
    st.sampled_from([1, 15]),
)
LONG: Any = ("turn", [({"a": "x" * 99}, "y" * 99)], 0.5, 20)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=6), seed=st.integers(0, 99))
@example(steps=[LONG] * 40, seed=0)
def test_an_episode_in_phases_has_the_transcript_of_one_that_is_whole(
    steps: list[Any], seed: int
) -> None:
    """Wherever it is left open, however often, and also where its progress has been in a file between."""
    whole, writer, dice = TranscriptWriter(), TranscriptWriter(), random.Random(seed)
    for text, calls, reward, count in steps:
        results = [CallResult(result) for _, result in calls] * count
        asked: list[ToolCall | BadCall] = [
            ToolCall("say", arguments) for arguments, _ in calls
        ] * count
        for transcript_writer in (whole, writer):
            transcript_writer.add_turn(text)
            transcript_writer.add_reward(reward)
            transcript_writer.add_calls(asked, results, [result.text for result in results])
            transcript_writer.add_message(text)
        for _ in range(dice.randrange(3)):
            entries = writer.entries
            writer = TranscriptWriter(
                json.loads(json_line(entries)) if dice.randrange(2) else entries
            )
    assert writer.transcript() == whole.transcript()


def test_entries_of_the_middle_are_left_out_of_a_very_long_episode() -> None:
    writer = TranscriptWriter()
    for number in range(2000):
        writer.add_turn(f"turn {number}")
    entries = writer.transcript()
    (place,) = [place for place, entry in enumerate(entries) if entry["role"] == "left_out"]
    assert entries[place]["text"] == f"[... {2000 - len(entries) + 1} entries left out ...]"
    assert [entry["text"] for entry in entries[:place]] == [
        f"turn {number}" for number in range(place)
    ]
    assert entries[-1]["text"] == "turn 1999"
