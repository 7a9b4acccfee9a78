"""The requests of an agent with turns that a script gives: which go on with a conversation, and which open one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.episode import EpisodeConfig
from megarl.environments.agents.chat import ChatAnswer, ChatRefused, ChatRequest, EpisodeOver
from megarl.episodes import agent_episode
from megarl.episodes.agent_episode import AgentEpisode
from megarl.episodes.agent_tools import ToolSet, ToolSets
from megarl.episodes.request_sampling import PolicySampling
from megarl.episodes.rows import EpisodeRows
from megarl.samples import accounting
from megarl.types import Prompt, Sample
from megarl.types.sampling import Sampling
from scripts.make_tiny_moe import make_tokenizer
from tests.episodes.sampler import ScriptedSampler

pytestmark = pytest.mark.slow  # the reader of calls is SGLang's

TOKENIZER: Any = make_tokenizer(tools=True)
DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}
CALL = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
PROMPT = Prompt("row 1", "", (1,), "")
Messages = list[dict[str, Any]]


class Script(ScriptedSampler):
    """Samples the text that `turns` has for the last words of the context."""

    def __init__(self, turns: dict[str, str]) -> None:
        super().__init__(TOKENIZER)
        self.turns = turns
        self.streams: list[tuple[int, ...]] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.has_begun = asyncio.Event()

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        self.streams.append(sampling.stream)
        self.has_begun.set()
        await self.may_go_on.wait()
        context = self.text(context_ids)
        text = next(text for words, text in self.turns.items() if context.endswith(words))
        ids = self.ids(text)
        begins = [TOKENIZER.decode(ids[:end]) for end in range(len(ids) + 1)]
        ends = [
            end for end, begin in enumerate(begins) if any(stop in begin for stop in sampling.stop)
        ]
        if ends:
            ids = ids[: ends[0]]
        elif not text.endswith("..."):
            ids = [*ids, TOKENIZER.eos_token_id]
        is_cut = text.endswith("...") or len(ids) > sampling.max_tokens
        return self.sample(context_ids, ids[: sampling.max_tokens], finished=not is_cut)


Ask = Callable[..., Any]


def played(
    turns: dict[str, str], agent: Callable[..., Any], *, scripted: bool = False, **limits: Any
) -> tuple[Sample, AgentEpisode, Script]:
    """An episode of an agent, whose account of tokens is checked. scripted: the agent takes the script too."""
    config = EpisodeConfig.model_validate({"agent": "a:b", "max_tokens": 200} | limits)

    async def run() -> tuple[Sample, AgentEpisode, Script]:
        script = Script(turns)
        rows = EpisodeRows(
            script, "episode-0", PROMPT, Sampling(1, 100, stream=(1, 2)), 0, 200, config.max_tokens
        )
        episode = AgentEpisode(rows, ToolSets(TOKENIZER, [TOKENIZER.eos_token_id]), config)

        async def ask(
            *messages: dict[str, Any], tools: Sequence[Any] = (), **fields: Any
        ) -> ChatAnswer:
            return await asyncio.create_task(episode.answer(ChatRequest(messages, tools, **fields)))

        await agent(ask, *([script] if scripted else []))
        await episode.close()
        await rows.end(1)
        return rows.sample(episode.end), episode, script

    sample, episode, script = asyncio.run(run())
    accounting.check(PROMPT, [sample])
    assert len(script.completed) == 1
    return sample, episode, script


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def texts(sample: Sample) -> list[str]:
    """Each row's tokens as text."""
    row_texts = []
    for row in sample.rows:
        row_texts.append(TOKENIZER.decode([*row.prompt_ids, *row.response_ids_T]))
    return row_texts


def test_a_chat_is_one_row_whose_turns_are_all_trained() -> None:
    async def agent(ask: Ask) -> None:
        first = await ask(user("hi"))
        assert (first.content, first.finish) == ("hello", "stop")
        message = {
            **first.message(),
            "refusal": None,
            "audio": None,
        }  # as the OpenAI client writes it
        second = await ask(user("hi"), message, user("how?"))
        last = {"role": "user", "content": [{"type": "text", "text": "ok"}]}
        await ask(user("hi"), message, user("how?"), second.message(), last)

    sample, episode, _ = played({"hi": "hello", "how?": "so", "ok": "yes"}, agent)
    assert episode.end == "answered" and sample.finished
    whole = "<bos><user>hi<eos><assistant>hello<eos><user>how?<eos><assistant>so<eos><user>ok<eos><assistant>yes<eos>"
    assert texts(sample) == [whole]
    trained = TOKENIZER.decode(sample.only_row.response_ids_T[sample.only_row.trained_T])
    assert trained == "hello<eos>so<eos>yes<eos>" and sample.text == "yes"
    assert sample.facts and (sample.facts.turns, sample.facts.sampled_tokens) == (
        3,
        int(sample.only_row.trained_T.sum()),
    )


def test_results_of_calls_are_tokenised_in_the_order_of_the_calls() -> None:
    async def agent(ask: Ask) -> None:
        first = await ask(user("go"), tools=[DOUBLE])
        assert first.finish == "tool_calls" and first.content == "twice"
        one, two = first.calls
        assert one.id != two.id and (one.name, json.loads(one.arguments)) == (
            "double",
            {"number": 4},
        )
        call_texts = (two, "b"), (one, "a")
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": text} for call, text in call_texts
        ]
        await ask(user("go"), first.message(), *results, tools=[DOUBLE])

    sample, _, _ = played({"go": f"twice{CALL}{CALL}", "ab": "8"}, agent)
    assert (
        len(sample.rows) == 1
        and sample.facts
        and (sample.facts.calls, sample.facts.call_errors) == (2, 0)
    )
    assert texts(sample)[0].endswith("<tool>a<eos><tool>b<eos><assistant>8<eos>")


def test_broken_calls_are_the_agents_to_answer_and_are_counted() -> None:
    """A call of an unknown tool or with wrong arguments is passed on; where none can be read, the text is."""
    wrong = CALL.replace("4", '"x"') + CALL.replace("double", "halve")

    async def agent(ask: Ask) -> None:
        first = await ask(user("one"), tools=[DOUBLE])
        assert [call.name for call in first.calls] == ["double", "halve"]
        second = await ask(user("two"), tools=[DOUBLE])
        assert not second.calls and second.content == CALL.replace("}", "")

    sample, _, _ = played({"one": wrong, "two": CALL.replace("}", "")}, agent)
    assert sample.facts and (sample.facts.calls, sample.facts.call_errors) == (3, 3)


def test_what_extends_no_conversation_opens_a_row_of_the_episode() -> None:
    """Sub-agents at once, a history that was shortened, a retry, and other tools; each sampled token is in one row."""

    async def agent(ask: Ask) -> None:
        first = await ask(user("go"))
        parts = await asyncio.gather(ask(user("left")), ask(user("left")))  # the same words twice
        await ask(user("go"), first.message(), user("short"))
        await ask(user("short"))
        await ask(user("go"), {**first.message(), "content": "other words"}, user("short"))
        await ask(user("left"), parts[0].message(), user("on"))

    sample, _, script = played({"go": "a", "left": "b", "short": "c", "on": "d"}, agent)
    assert sample.facts and (sample.facts.turns, len(sample.rows)) == (7, 5)
    assert texts(sample)[0].count("<assistant>") == 2 and texts(sample)[1].endswith(
        "<user>on<eos><assistant>d<eos>"
    )
    assert sample.num_trained == sample.facts.sampled_tokens and not sample.facts.dropped_unawaited
    assert len(set(script.streams)) == 5, (
        "rows that begin at one place do not get the same random numbers"
    )


def test_random_numbers_of_a_row_do_not_depend_on_the_order_of_requests() -> None:
    """With seeded sampling an agent whose requests meet in another order gets the same answers."""
    streams_by_order = {}
    for words in (("left", "right"), ("right", "left")):

        async def agent(ask: Ask, words: Sequence[str] = words) -> None:
            for word in words:
                await ask(user(word))

        _, _, script = played({"left": "b", "right": "c"}, agent)
        streams_by_order[words] = dict(zip(words, script.streams, strict=True))
    assert streams_by_order["left", "right"] == streams_by_order["right", "left"]
    assert streams_by_order["left", "right"]["left"] != streams_by_order["left", "right"]["right"]


def test_rendered_requests_go_on_where_the_tokens_do() -> None:
    async def agent(ask: Ask) -> None:
        first = await ask(user("hi"))
        await ask(user("hi"), first.message(), user("how?"))
        await ask(user("hi"), {"role": "assistant", "content": "hallo"}, user("how?"))

    sample, _, _ = played({"hi": "hello", "how?": "so"}, agent, history="render")
    assert len(sample.rows) == 2 and texts(sample)[0].count("<assistant>") == 2


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"max_turns": 2}, "max_turns"), ({"max_tokens": 30}, "max_tokens")],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_limit_is_told_and_counts_as_the_end(limits: dict[str, Any], end: str) -> None:
    async def agent(ask: Ask) -> None:
        messages: Messages = [user("hi")]
        with pytest.raises(EpisodeOver, match=f"episode.{end}"):
            for _ in range(9):
                answer = await ask(*messages)
                messages += [answer.message(), user("hi")]
        with pytest.raises(EpisodeOver, match=f"episode.{end}"):
            await ask(user("again"))

    sample, episode, _ = played({"hi": "hello"}, agent, **limits)
    assert episode.end == end and not sample.finished and sample.facts and sample.facts.turns >= 2


def test_a_cut_turn_cannot_go_on() -> None:
    async def agent(ask: Ask) -> None:
        first = await ask(user("hi"))
        assert first.finish == "length"
        await ask(user("hi"), first.message(), user("how?"))

    sample, episode, _ = played({"hi": "hello...", "how?": "so..."}, agent)
    assert episode.end == "cut" and len(sample.rows) == 2


def test_a_stop_text_ends_a_turn_and_the_conversation_goes_on() -> None:
    """The client sees the text before it; the row has all that was sampled, and the end that the template writes."""

    async def agent(ask: Ask) -> None:
        first = await ask(user("hi"), stop=("xyz", "stop:"))
        assert (first.content, first.finish, first.completion_tokens) == (
            "think ",
            "stop",
            len("think stop:"),
        )
        second = await ask(user("hi"), first.message(), user("how?"), stop=("none",))
        assert (second.content, second.finish) == ("so", "stop")
        await ask(user("hi"), first.message(), user("how?"), second.message(), user("ok"))

    sample, episode, _ = played({"hi": "think stop: more", "how?": "so", "ok": "yes"}, agent)
    assert episode.end == "answered"
    assert texts(sample) == [
        "<bos><user>hi<eos><assistant>think stop:<eos><user>how?<eos><assistant>so<eos><user>ok<eos><assistant>yes<eos>"
    ]
    assert (
        TOKENIZER.decode(sample.only_row.response_ids_T[sample.only_row.trained_T])
        == "think stop:so<eos>yes<eos>"
    )


def test_a_stop_text_after_calls_and_inside_of_one() -> None:
    """Whole calls before it are calls; a call that it cuts is a text."""

    async def agent(ask: Ask) -> None:
        whole = await ask(user("go"), tools=[DOUBLE], stop=("end",))
        assert (whole.content, whole.finish, len(whole.calls)) == ("twice", "tool_calls", 1)
        result = {"role": "tool", "tool_call_id": whole.calls[0].id, "content": "8"}
        cut = await ask(user("go"), whole.message(), result, tools=[DOUBLE], stop=('"arguments"',))
        assert (cut.finish, cut.calls) == ("stop", ()) and cut.content.endswith(
            '{"name": "double", '
        )

    sample, _, _ = played({"go": f"twice{CALL}end", "8": CALL}, agent)
    assert len(sample.rows) == 1 and f"{CALL}end<eos>" in texts(sample)[0]


def test_max_tokens_of_a_request_cut_its_turn() -> None:
    """As a turn that the recipe's limit has cut; a larger number than the recipe's changes nothing."""

    async def agent(ask: Ask) -> None:
        cut = await ask(user("hi"), max_tokens=3)
        assert (cut.content, cut.finish, cut.completion_tokens) == ("hel", "length", 3)
        assert (await ask(user("hi"), max_tokens=1000)).content == "hello"
        await ask(user("hi"), cut.message(), user("how?"), max_tokens=1)

    sample, episode, _ = played({"hi": "hello", "how?": "so"}, agent)
    assert (episode.end, len(sample.rows)) == ("cut", 3)


def test_another_temperature_than_the_recipes_is_refused() -> None:
    """Its own is taken, also where the episode is of an evaluation at another; the refusal names field and key."""
    policy = PolicySampling(temperature=0.7, top_p=1.0)

    def check(is_temperature: float, is_top_p: float, **asked: Any) -> None:
        sampling = Sampling(1, 9, temperature=is_temperature, top_p=is_top_p)
        policy.check(ChatRequest([user("hi")], **asked), sampling)

    for temperature, top_p in ((0.7, None), (0.0, None), (None, 1), (None, 0.9)):
        check(0.0, 0.9, temperature=temperature, top_p=top_p)
    words = r"temperature 0.2 is refused: rollout.temperature is 0.7, and .*set rollout.temperature to 0.2"
    with pytest.raises(ChatRefused, match=words) as caught:
        check(0.7, 1.0, temperature=0.2)
    assert caught.value.param == "temperature"
    with pytest.raises(ChatRefused, match=r"rollout.top_p is 1 \(0.9 in this episode\), and "):
        check(0.7, 0.9, top_p=0.5)

    async def agent(ask: Ask) -> None:
        with pytest.raises(ChatRefused, match="temperature 0.2 is refused"):
            await ask(user("hi"), temperature=0.2)
        await ask(user("hi"), temperature=1.0, top_p=1)

    assert played({"hi": "hello"}, agent)[1].end == "answered"


def test_a_turn_that_is_not_delivered_is_dropped_and_counted() -> None:
    """And with it what was said before it; what was delivered before stays."""

    async def agent(ask: Ask, script: Script) -> None:
        first = await ask(user("hi"))
        script.may_go_on.clear()
        script.has_begun.clear()
        late = asyncio.create_task(ask(user("hi"), first.message(), user("how?")))
        await script.has_begun.wait()
        asyncio.get_running_loop().call_soon(script.may_go_on.set)
        late.add_done_callback(lambda task: task.exception() if not task.cancelled() else None)

    sample, _, _ = played({"hi": "hello", "how?": "so"}, agent, scripted=True)
    assert sample.facts and (sample.facts.turns, sample.facts.dropped_unawaited) == (2, 3)
    assert texts(sample) == ["<bos><user>hi<eos><assistant>hello<eos>"]


def test_requests_that_cannot_be_answered_are_refused_and_the_episode_goes_on() -> None:
    async def agent(ask: Ask) -> None:
        for messages, words in (
            ([], "0 messages"),
            ([{"role": "robot", "content": "a"}], "role"),
            ([{"role": ["user"], "content": "a"}], "role"),
            ([user("a"), {"role": "assistant", "content": "b"}], "last message"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "no text"),
            ([user("a") | {"name": {}}], "the name of message 1 is no text"),
            ([user("\ud800")], "half a surrogate pair"),
            (
                [user("a"), {"role": "assistant", "tool_calls": [{}]}, user("b")],
                "a call of message 2",
            ),
            (
                [user("a"), {"role": "assistant", "tool_calls": 5}, user("b")],
                "tool_calls of message 2 are no list",
            ),
            ([user("a"), {"role": "tool", "content": "b"}], "tool_call_id"),
        ):
            with pytest.raises(ChatRefused, match=words):
                await ask(*messages)
        await ask(user("<eos>hi"))

    sample, episode, _ = played({"hi": "hello"}, agent)
    assert episode.end == "answered" and texts(sample) == [
        "<bos><user>< eos>hi<eos><assistant>hello<eos>"
    ]


def double(parameters: Any = None, **function: Any) -> dict[str, Any]:
    """DOUBLE with another schema of its number, or other keys."""
    schema = DOUBLE["function"]["parameters"] | {"properties": {"number": parameters or {}}}
    return {
        "type": "function",
        "function": {**DOUBLE["function"], "parameters": schema, **function},
    }


def test_tools_that_cannot_be_used_are_refused_and_the_episode_goes_on() -> None:
    deep: Any = {}
    for _ in range(600):
        deep = {"items": deep}

    async def agent(ask: Ask) -> None:
        for tool in (
            {"function": {}}, double(description=5), double(deep), double({"$ref": "#/$defs/nope"}),
            double({"$ref": "http://127.0.0.1:1/x"}), double(description="x" * 2**18), double(description="\ud800"),
        ):  # fmt: skip
            with pytest.raises(ChatRefused, match="the tools "):
                await ask(user("go"), tools=[tool])
        for odd in (
            double({"$ref": "#/properties/number"}),
            double({"pattern": "^(a+)+$"}, strict="x y z"),
        ):
            assert (await ask(user("go"), tools=[odd])).finish == "tool_calls"

    sample, episode, _ = played({"go": CALL}, agent)
    assert (
        episode.end == "answered"
        and sample.facts
        and (sample.facts.turns, sample.facts.call_errors) == (2, 0)
    )


def test_whatever_a_library_raises_for_a_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has not failed, and the episode goes on."""
    step = agent_episode.rendered

    def broken(messages: Messages, *rest: Any) -> list[int]:
        return step(messages, *rest) if messages[-1]["content"] == "hi" else [][0]

    monkeypatch.setattr(agent_episode, "rendered", broken)

    async def agent(ask: Ask) -> None:
        with pytest.raises(ChatRefused, match="IndexError"):
            await ask(user("a"))
        await ask(user("hi"))

    _, episode, _ = played({"hi": "hello"}, agent)
    assert episode.end == "answered" and episode._rows.error is None


def test_a_turn_that_cannot_be_read_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read = agent_episode._read
    monkeypatch.setattr(
        agent_episode, "_read", lambda *args: read(*args) if len(args[1]) == 3 else [][0]
    )

    async def agent(ask: Ask) -> None:
        with pytest.raises(ChatRefused, match="IndexError"):
            await ask(user("hi"))
        await ask(user("how?"))

    sample, episode, _ = played({"hi": "hello", "how?": "so"}, agent)
    assert sample.facts and (
        sample.facts.turns,
        sample.facts.dropped_unawaited,
        sample.num_trained,
    ) == (2, 6, 3)
    assert episode.end == "answered" and episode._rows.error is None


def test_an_engine_that_fails_under_several_requests_leaves_no_turn_behind() -> None:
    """Each raises an exception of its own, and the first is the fault."""

    async def agent(ask: Ask) -> None:
        errors = await asyncio.gather(
            *(ask(user(f"unknown {word}")) for word in "abc"), return_exceptions=True
        )
        assert [type(error) for error in errors] == [EpisodeOver] * 3
        with pytest.raises(EpisodeOver, match="the engine has failed"):
            await ask(user("hi"))

    sample, episode, _ = played({"hi": "hello"}, agent)
    assert isinstance(episode._rows.error, RuntimeError) and episode.end == "agent"
    assert sample.facts and (sample.facts.turns, sample.facts.sampled_tokens) == (0, 0)


def test_requests_at_once_share_the_tokens_of_the_episode() -> None:
    """Whoever finds them reserved waits for a turn to end, and is told where none are left."""

    async def agent(ask: Ask) -> None:
        answers = await asyncio.gather(*(ask(user("hi")) for _ in range(4)), return_exceptions=True)
        over = [answer for answer in answers if isinstance(answer, EpisodeOver)]
        assert over and len(answers) - len(over) >= 2

    sample, episode, _ = played({"hi": "hello world"}, agent, max_tokens=30)
    assert (
        sample.facts
        and sample.facts.sampled_tokens == sample.num_trained <= 30
        and episode.end == "max_tokens"
    )


def test_turns_that_nobody_awaits_count_as_turns() -> None:
    async def agent(ask: Ask, script: Script) -> None:
        script.may_go_on.clear()
        for _ in range(2):
            script.has_begun.clear()
            late = asyncio.create_task(ask(user("hi")))
            await script.has_begun.wait()
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
        with pytest.raises(EpisodeOver, match=r"episode\.max_turns"):
            await ask(user("hi"))
        script.may_go_on.set()

    sample, episode, _ = played({"hi": "hello"}, agent, scripted=True, max_turns=2)
    assert sample.facts and (sample.facts.turns, sample.facts.dropped_unawaited) == (
        2,
        sample.facts.sampled_tokens,
    )
    assert episode.end == "max_turns" and not sample.num_trained


def test_the_transcript_has_each_message_once() -> None:
    async def agent(ask: Ask) -> None:
        system = {"role": "system", "content": "be short"}
        first = await ask(system, user("hi"))
        await ask(system, user("hi"), {**first.message(), "content": "hallo"}, user("how?"))

    sample, _, _ = played({"hi": "hello", "how?": "so"}, agent)
    assert len(sample.rows) == 2
    entries = [(entry["role"], entry["text"]) for entry in sample.transcript]
    assert entries == [
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "how?"),
        ("assistant", "so"),
    ]


def test_the_time_of_an_agent_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that before it begins, nor that in which its requests are read and answered."""
    now_s = [0.0]
    monkeypatch.setattr(agent_episode, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Slow(ToolSets):
        def of(self, schemas: Sequence[Any]) -> ToolSet:
            now_s[0] += 100
            return super().of(schemas)

    async def run() -> float:
        config = EpisodeConfig.model_validate({"agent": "a:b", "max_tokens": 200})
        rows = EpisodeRows(
            Script({"hi": "hello"}),
            "episode-0",
            PROMPT,
            Sampling(1, 100, stream=(1, 2)),
            0,
            200,
            200,
        )
        episode = AgentEpisode(rows, Slow(TOKENIZER, [TOKENIZER.eos_token_id]), config)
        now_s[0] += 10  # in the queue
        episode.begin()
        now_s[0] += 1
        await asyncio.gather(
            *(asyncio.create_task(episode.answer(ChatRequest([user("hi")]))) for _ in range(2))
        )
        now_s[0] += 2
        await episode.close()
        return rows.tally.tool_s

    assert asyncio.run(run()) == 3.0
