"""The tool calls of a turn by SGLang's readers: the format that fits the template, and no call that disappears."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.episodes.call_probe import ReasoningTags
from megarl.episodes.template import ChatTemplate
from megarl.episodes.tool_calls import MOST_CALLS, BadCall, CallFormat, ToolCall, Turn
from megarl.types import UserError
from tests.episodes.chatml_families import (
    CHATML,
    HERMES,
    NEMOTRON,
    QWEN_2_5,
    QWEN_3,
    QWEN_3_CODER,
    QWEN_3_THINKING,
)
from tests.episodes.families import CALC, TOOLS, Family, stop_ids, tokenizer_of
from tests.episodes.other_families import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    GLM_4_5,
    GPT_OSS,
    KIMI_K2,
    LLAMA_3,
    LLAMA_3_1,
    MISTRAL,
)

pytestmark = pytest.mark.slow  # imports SGLang

GOOD = ToolCall("calc", {"expression": "1+2"})
FAMILIES = {
    family.name: family
    for family in (
        QWEN_2_5, QWEN_3, QWEN_3_THINKING, QWEN_3_CODER, HERMES, NEMOTRON, DEEPSEEK_V3, DEEPSEEK_V3_1, KIMI_K2, GLM_4_5,
        LLAMA_3_1, MISTRAL,
    )
}  # fmt: skip
PARALLEL = [family for family in FAMILIES.values() if family is not LLAMA_3_1]
TAGGED = [family for family in PARALLEL if family is not MISTRAL]


@cache
def format_of(family: Family) -> CallFormat:
    return CallFormat.find(tokenizer_of(family), stop_ids(family), TOOLS)


def written(family: Family, *calls: tuple[str, Mapping[str, Any]], content: str = "") -> str:
    """A turn as the template writes it, after its reasoning and without its stop token."""
    template = ChatTemplate(tokenizer_of(family), TOOLS)
    dicts = [
        template.call_style.call(name, arguments, index)
        for index, (name, arguments) in enumerate(calls)
    ]
    question: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}]
    _, ids = template.turn(question, {"role": "assistant", "content": content, "tool_calls": dicts})
    text = template.decode([token for token in ids if token not in stop_ids(family)])
    return text.rpartition("</think>")[2].lstrip()


def read(family: Family, text: str) -> Turn:
    """Read a turn whose reasoning is closed."""
    opened = format_of(family).reasoning.opened
    return format_of(family).read(f"so</think>{text}" if opened else text)


@pytest.mark.parametrize(
    ("name", "expected", "others"),
    [
        ("qwen2.5", "qwen", "hermes"),
        ("qwen3", "qwen", "hermes"),
        ("qwen3-thinking", "qwen", "hermes"),
        ("qwen3-coder", "qwen3_coder", ""),
        ("hermes", "qwen", "hermes"),
        ("nemotron", "qwen3_coder", ""),
        ("deepseek-v3", "deepseekv3", ""),
        ("deepseek-v3.1", "deepseekv31", ""),
        ("kimi-k2", "kimi_k2", ""),
        ("glm-4.5", "glm", ""),
        ("llama-3.1", "llama3", ""),
        ("mistral", "mistral", ""),
    ],
)
def test_the_format_is_the_one_that_gives_back_what_the_template_writes(
    name: str, expected: str, others: str
) -> None:
    call_format = format_of(FAMILIES[name])
    assert (call_format.name, call_format.parallel) == (expected, name != "llama-3.1")
    assert call_format.why.startswith(
        f"calls are read as SGLang's {expected}, which gives back what the chat template writes"
    )
    assert others in call_format.why


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_sampled_call_is_read_with_the_id_that_the_model_wrote(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer(str(family.calls), add_special_tokens=False)["input_ids"]
    assert ids[-1] in stop_ids(family)
    turn = format_of(family).read(tokenizer.decode(ids[:-1]))
    id = {"kimi-k2": "functions.calc:7", "mistral": "abcdefgh7"}.get(family.name)
    reasoning = "so" if "so" in str(family.calls) else ""
    assert turn == Turn("", (replace(GOOD, id=id),), reasoning)


@pytest.mark.parametrize("family", PARALLEL, ids=lambda family: family.name)
def test_words_and_parallel_calls_come_in_their_order(family: Family) -> None:
    second = {"query": "b", "filters": {"c": [1, "d"]}}
    drops_words = family is MISTRAL
    turn = read(
        family,
        written(family, ("calc", GOOD.arguments), ("look_up", second), content="Let us see."),
    )
    assert turn.content == ("" if drops_words else "Let us see.")
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    assert [(call.name, call.arguments) for call in calls] == [
        ("calc", GOOD.arguments),
        ("look_up", second),
    ]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_turn_without_calls_is_its_words(family: Family) -> None:
    turn = read(family, "\n\nThe answer is <b>3</b>.\n")
    assert (turn.content, turn.calls) == ("The answer is <b>3</b>.", ())


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_a_broken_call_between_two_good_ones_is_told(family: Family) -> None:
    good, broken = ("calc", {"expression": "4+5"}), ("calc", GOOD.arguments)
    whole = written(family, good, broken, good)
    is_json = '1+2"' in whole
    start = whole.index("1+2")
    if is_json:
        text = whole.replace('1+2"', "1+2")
    else:
        closing = "</parameter>" if "</parameter>" in whole else "</arg_value>"
        text = whole[:start] + whole[start:].replace(closing, "", 1)
    turn = read(family, text)
    first, bad, last = turn.calls
    assert isinstance(first, ToolCall) and isinstance(last, ToolCall)
    assert isinstance(bad, BadCall) and bad.name == "calc"
    assert bad.reason.startswith("The call of calc could not be made: ")
    assert ("JSON" if is_json else "an argument is not closed") in bad.reason


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_call_without_arguments_is_read(family: Family) -> None:
    schema = {
        "type": "function",
        "function": {"name": "wait", "description": "Wait.", "parameters": {"type": "object"}},
    }
    call_format = CallFormat.find(tokenizer_of(family), stop_ids(family), [schema])
    text = written(family, ("wait", {}))
    (call,) = call_format.read(f"so</think>{text}" if call_format.reasoning.opened else text).calls
    assert call == ToolCall("wait", {}, call.id)


@pytest.mark.parametrize("family", [LLAMA_3_1, MISTRAL], ids=lambda family: family.name)
def test_a_broken_call_of_a_format_without_tags_is_told(family: Family) -> None:
    turn = read(family, str(family.calls).replace('1+2"', "1+2").removesuffix(family.stops[0]))
    (bad,) = turn.calls
    assert isinstance(bad, BadCall) and bad.name == "calc" and "JSON is broken" in bad.reason


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("guess", {"expression": "1"}, "there is no such tool; the tools are calc, look_up"),
        ("calc", {"digits": 3}, "'expression' is a required property"),
        (
            "calc",
            {"expression": "1", "digits": "many"},
            "argument digits: 'many' is not of type 'integer'",
        ),
        (
            "calc",
            {"expression": "1", "unit": "m"},
            "Additional properties are not allowed ('unit' was unexpected)",
        ),
    ],
    ids=["unknown", "missing", "mistyped", "extra"],
)
def test_a_call_that_does_not_fit_its_tool_is_told(
    family: Family, name: str, arguments: Mapping[str, Any], reason: str
) -> None:
    (call,) = read(family, written(family, (name, arguments))).calls
    assert isinstance(call, BadCall) and call.name == name
    assert call.reason == f"The call of {name} could not be made: {reason}"


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_a_call_that_is_cut_short_is_told(family: Family) -> None:
    whole = written(family, ("calc", GOOD.arguments))
    (call,) = read(family, whole[: whole.index("1+2") + 3]).calls
    assert isinstance(call, BadCall)


@pytest.mark.parametrize(
    "family", [QWEN_3, QWEN_3_CODER, GLM_4_5, KIMI_K2], ids=lambda family: family.name
)
def test_an_opening_tag_inside_an_argument_is_no_call(family: Family) -> None:
    opening = format_of(family).marks.opening
    turn = read(family, written(family, ("calc", {"expression": f"a {opening} b"})))
    assert [call for call in turn.calls if isinstance(call, ToolCall)] == list(turn.calls) and len(
        turn.calls
    ) == 1


def test_calls_inside_the_reasoning_are_not_made() -> None:
    calls = str(QWEN_3.calls).removesuffix("<|im_end|>")
    call_format, thinking = format_of(QWEN_3), format_of(QWEN_3_THINKING)
    assert call_format.read(f"<think>\nor {calls}?\n</think>\n\nno") == Turn(
        "no", (), f"or {calls}?"
    )
    assert thinking.read(f"or {calls}?\n</think>\n\nno") == Turn("no", (), f"or {calls}?")
    # no reasoning was opened
    assert call_format.read(f"a </think> b {calls}") == Turn("a </think> b", (GOOD,))
    assert thinking.read("hm") == Turn("", (), "hm")
    for format_, text in ((call_format, f"<think>{calls}"), (thinking, calls)):
        turn = format_.read(text)
        (bad,) = turn.calls
        assert bad == BadCall(
            None,
            "A tool call could not be made: it stands in reasoning that is not closed by </think>",
        )
        assert turn.content == ""


def test_reasoning_is_opened_by_the_prompt_that_came_before() -> None:
    """DeepSeek-V3's prompt opens it after a user's message, and not after the results of tools."""
    call_format = format_of(DEEPSEEK_V3)
    assert call_format.reasoning == ReasoningTags(
        "<think>", "</think>", opened=True, opened_after_tools=False
    )
    assert call_format.read("three", after_tools=True) == Turn("three")
    assert call_format.read("three") == Turn("", (), "three")
    assert format_of(QWEN_3_THINKING).reasoning.opened_after_tools


def test_a_format_for_one_call_a_turn_makes_none_of_several() -> None:
    call = '{"name": "calc", "parameters": {"expression": "1+2"}}'
    assert format_of(LLAMA_3_1).read(call) == Turn("", (GOOD,))
    (bad,) = format_of(LLAMA_3_1).read(f"{call};{call}").calls
    assert (
        isinstance(bad, BadCall) and "the turn has 2 calls, and at most 1 can be made" in bad.reason
    )
    limited = replace(format_of(QWEN_3), parallel=False)
    (bad,) = limited.read(written(QWEN_3, ("calc", GOOD.arguments), ("calc", GOOD.arguments))).calls
    assert (
        isinstance(bad, BadCall) and "the turn has 2 calls, and at most 1 can be made" in bad.reason
    )


def test_a_model_that_repeats_itself_makes_no_call() -> None:
    call = written(QWEN_3, ("calc", GOOD.arguments))
    assert len(format_of(QWEN_3).read(call * MOST_CALLS).calls) == MOST_CALLS
    (bad,) = format_of(QWEN_3).read("words " + call * (MOST_CALLS + 1)).calls
    assert (
        isinstance(bad, BadCall)
        and f"the turn has {MOST_CALLS + 1} calls, and at most" in bad.reason
    )


@pytest.mark.parametrize(
    "body",
    [
        "3", "null", '"calc"', "[" * 100_000, "9" * 5_000, '{"name": 3}', '{"arguments": {}}', "",
        *(f'{{"name": "calc", "arguments": {arguments}}}' for arguments in ('"{}"', "[1]", "3", "null")),
    ],
)  # fmt: skip
def test_json_that_is_no_call_is_told(body: str) -> None:
    first, last = format_of(QWEN_3).read(
        f"<tool_call>\n{body}\n</tool_call>\n{written(QWEN_3, ('calc', GOOD.arguments))}"
    ).calls  # fmt: skip
    assert isinstance(first, BadCall) and last == GOOD


@pytest.mark.parametrize("family", [QWEN_3, HERMES, LLAMA_3_1], ids=lambda family: family.name)
def test_half_a_surrogate_pair_in_a_call_is_told(family: Family) -> None:
    """JSON can escape it, UTF-8 cannot hold it, and so neither the tokenizer nor an agent can take it."""
    whole = written(family, ("calc", GOOD.arguments))
    for text, name, reason in (
        (whole.replace("calc", "\\ud83d"), "\\ud83d", "there is no such tool"),
        (
            whole.replace("1+2", "\\ud83d"),
            "calc",
            "an argument has half a surrogate pair, which is no character",
        ),
        (whole.replace("expression", "\\udc00"), "calc", "an argument has half a surrogate pair"),
    ):
        (bad,) = read(family, text).calls
        assert isinstance(bad, BadCall) and bad.name == name
        assert bad.reason.startswith(f"The call of {name} could not be made: {reason}")
        assert all(part is None or part.encode() for part in (bad.name, bad.reason, bad.arguments))


def test_a_reason_is_short_whatever_the_model_wrote() -> None:
    (bad,) = read(QWEN_3, written(QWEN_3, ("calc", {"expression": ["x" * 5_000]}))).calls
    assert isinstance(bad, BadCall) and len(bad.reason) == 300


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (LLAMA_3, "the chat template leaves tool calls out of the text without an error"),
        (GPT_OSS, "readers of tool calls gives back the calls that the chat template writes"),
        (
            replace(CHATML, name="picky", template="{{ raise_exception('no') }}"),
            "the chat template refuses tool calls (no)",
        ),
    ],
    ids=["left_out", "no_reader", "refused"],
)
def test_a_template_without_readable_calls_is_refused(family: Family, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        format_of(family)
    assert caught.value.where == "episode.tools" and problem in caught.value.problem
    assert "\n" not in str(caught.value)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="episode.tools: two tools have the same name"):
        CallFormat.find(tokenizer_of(QWEN_3), stop_ids(QWEN_3), [CALC, CALC])


@given(
    family=st.sampled_from([QWEN_3, DEEPSEEK_V3_1, KIMI_K2, MISTRAL]),
    texts=st.lists(
        st.text(alphabet=st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=3
    ),
    nested=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists, max_leaves=5
    ),
)
def test_any_arguments_in_json_come_back(family: Family, texts: list[str], nested: Any) -> None:
    calls = [("look_up", {"query": text, "filters": {"a": nested}}) for text in texts]
    read_calls = read(family, written(family, *calls)).calls
    assert [
        (call.name, call.arguments) for call in read_calls if isinstance(call, ToolCall)
    ] == calls


@given(
    family=st.sampled_from(TAGGED),
    cut=st.tuples(st.floats(0, 1), st.integers(0, 30)),
    put=st.sampled_from(["", '"', "}", "{", "</tool_call>", "\n", "<"]),
)
def test_no_call_disappears_however_the_text_is_damaged(
    family: Family, cut: tuple[float, int], put: str
) -> None:
    """As many calls come out as opening tags stand in the text, or one that tells that the text holds calls."""
    whole = written(family, ("calc", GOOD.arguments), ("look_up", {"query": "b"}), content="words")
    start = int(cut[0] * len(whole))
    text = whole[:start] + put + whole[start + cut[1] :]
    turn, opening = read(family, text), str(format_of(family).marks.opening)
    arguments = json.dumps([call.arguments for call in turn.calls if isinstance(call, ToolCall)])
    assert len(turn.calls) + arguments.count(opening) >= text.count(opening)
    for call in turn.calls:
        assert call.name in ("calc", "look_up") or isinstance(call, BadCall)
