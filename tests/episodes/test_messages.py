"""Messages of agents and turns as messages: ids of calls, and which result belongs to which call."""

from __future__ import annotations

from typing import Any

from megarl.episodes.messages import assistant_message, rendered, said
from megarl.episodes.tool_calls import BadCall, ToolCall, Turn
from megarl.episodes.turn_tokenizer import TurnTokenizer
from scripts.make_tiny_moe import make_tokenizer

TOKENIZER: Any = make_tokenizer(tools=True)
NAMED = "<{{ message.name or '' }}{{ message.role"
TOKENIZER.chat_template = TOKENIZER.chat_template.replace("<{{ message.role", NAMED)
TOKENISING = TurnTokenizer(TOKENIZER, [TOKENIZER.eos_token_id])


def turn_of(*calls: ToolCall | BadCall) -> dict[str, Any]:
    return assistant_message(Turn("", calls), "", TOKENISING.template, 5)


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_calls_of_a_turn_have_ids_of_their_own() -> None:
    """The first of equal ones stays as the model wrote it, and none that is made is another's."""
    form = TOKENISING.template.call_style.id_form.format
    written_ids = ["a", "a", None, form(name="add", index=7), "", "a"]
    message = turn_of(
        *(ToolCall("add", {}, id) for id in written_ids[:3]),
        *(BadCall("add", "no", id) for id in written_ids[3:]),
    )
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 6 and (ids[0], ids[3]) == ("a", written_ids[3])
    plain = turn_of(ToolCall("add", {}), ToolCall("add", {}))
    assert [call["id"] for call in plain["tool_calls"]] == [
        form(name="add", index=index) for index in (5, 6)
    ]


def test_results_are_those_of_the_calls_whose_ids_they_name() -> None:
    """In the splice, which has them in the order of the calls, and where the conversation is rendered."""
    calls = [
        {"id": name[0], "function": {"name": name, "arguments": "{}"}} for name in ("add", "sub")
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [result("s", "two"), result("a", "one")]
    tokenised = said(results, turn, TOKENISING, TOKENIZER.eos_token_id)
    assert tokenised is not None
    assert TOKENIZER.decode(tokenised).endswith("<addtool>one<eos><subtool>two<eos><assistant>")
    whole = rendered([{"role": "user", "content": "go"}, turn, *results], TOKENISING)
    assert TOKENIZER.decode(whole).endswith("<subtool>two<eos><addtool>one<eos><assistant>")
    for wrong in (results[:1], [results[0], results[0]]):
        assert said(wrong, turn, TOKENISING, TOKENIZER.eos_token_id) is None


def test_equal_ids_of_an_agents_own_calls_are_paired_in_their_order() -> None:
    calls = [{"id": "a", "function": {"name": name, "arguments": "{}"}} for name in ("add", "sub")]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [result("a", "one"), result("a", "two")]
    whole = TOKENIZER.decode(
        rendered([{"role": "user", "content": "go"}, turn, *results], TOKENISING)
    )
    assert whole.endswith("<addtool>one<eos><subtool>two<eos><assistant>")
