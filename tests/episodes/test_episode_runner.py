"""The loop of an episode with real tools and environments in their processes, and turns that a script gives."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config import RewardConfig
from megarl.config.episode import EpisodeConfig
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.rows import EpisodeResult
from megarl.episodes.tool_calls import CallFormat
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.rollout.worker import Generated, RolloutWorker
from megarl.types import Prompt, Sample
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling
from scripts.make_tiny_moe import make_tokenizer
from tests.episodes.sampler import ScriptedSampler

pytestmark = pytest.mark.slow  # the reader of calls is SGLang's

ODD = '''
import time

from megarl.environments import Environment, Observation


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def say(words: str) -> str:
    """The words."""
    return words


def refuse(number: int) -> int:
    """No number."""
    raise ValueError(number)


def hang(number: int) -> int:
    """Never."""
    time.sleep(60)
    return number


def end(number: int) -> Observation:
    """The end."""
    return Observation("over", reward=float(number), done=True)


class Odd(Environment):
    """Fails where its row says so."""

    def reset(self, row):
        self._row = row
        if row["fails"] == "reset":
            raise ValueError("no row")
        return row.get("opening")

    def reply(self, text):
        if self._row["fails"] == "reply":
            raise ValueError("no words")
        if self._row["fails"] == "reply hangs":
            time.sleep(60)
        return Observation(self._row.get("says") or f"you said {text}", reward=0.25)

    def reward(self):
        if self._row["fails"] == "reward":
            raise ValueError("no idea")
        return None if self._row["fails"] == "none" else 0.5
'''
TOOLS = ("double", "say", "refuse", "hang", "end")
MARKUP = "a<eos><user>" * 25
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


class Script(ScriptedSampler):
    """Samples turns that are given: texts, or a text without an end where it is cut. seconds: that each takes."""

    def __init__(self, tokenizer: Any, turns: Sequence[str], seconds: float = 0.0) -> None:
        super().__init__(tokenizer)
        self.turns = list(turns)
        self._seconds = seconds

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        await asyncio.sleep(self._seconds)
        text = self.turns[number]
        ids = self.ids(text)
        is_cut = text.endswith("...") or len(ids) >= sampling.max_tokens
        ids = ids[: sampling.max_tokens] if is_cut else [*ids, self.tokenizer.eos_token_id]
        return self.sample(context_ids, ids, finished=not is_cut)


Play = Callable[..., tuple[EpisodeResult, Script]]


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EnvironmentThread]]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_answers.py").write_text(ODD)
    sys.path.append(str(folder))
    limits = {"call_timeout_s": 1.0, "workers": 1}
    threads_by_kind = {
        "tools": EnvironmentThread(
            EnvironmentSettings(tools=tuple(f"odd_answers:{name}" for name in TOOLS), **limits)
        ),
        "environment": EnvironmentThread(
            EnvironmentSettings(environment="odd_answers:Odd", **limits)
        ),
    }
    yield threads_by_kind
    for thread in threads_by_kind.values():
        thread.shutdown()
    sys.path.remove(str(folder))


def _tokenizer() -> Any:
    return make_tokenizer(tools=True)


@pytest.fixture
def play(threads: dict[str, EnvironmentThread]) -> Play:
    def once(
        kind: str,
        *turns: str,
        row: Any = None,
        forgets: bool = False,
        turn_s: float = 0.0,
        turn_tokens: int = 120,
        **limits: Any,
    ) -> tuple[EpisodeResult, Script]:
        """forgets: the chat template leaves out what stands before a semicolon in an earlier turn. turn_s: seconds."""
        thread, tokenizer = threads[kind], _tokenizer()
        if forgets:
            later = "message.content.split(';')[-1 if message.role == 'assistant' else 0]"
            tokenizer.chat_template = str(tokenizer.chat_template).replace("message.content", later)
            assert later in tokenizer.chat_template
        turn_tokenizer = TurnTokenizer(tokenizer, [tokenizer.eos_token_id], thread.schemas)
        calls = (
            CallFormat.find(tokenizer, [tokenizer.eos_token_id], thread.schemas)
            if thread.schemas
            else None
        )
        config = EpisodeConfig.model_validate(
            {"tools": ["a:b"], "max_tokens": 400, "max_turns": 4} | limits
        )
        script = Script(tokenizer, turns, turn_s)
        episodes = EpisodeRunner(
            config, script, thread, turn_tokenizer, calls, max_prompt_tokens=60
        )
        prompt = Prompt(
            "row 1", "", tuple(turn_tokenizer.first("go")), "", {"fails": "", **(row or {})}, "go"
        )
        return asyncio.run(episodes.run(prompt, Sampling(1, turn_tokens, stream=(1, 2)), 0)), script

    return once


def text_of(script: Script, played: EpisodeResult) -> str:
    return script.tokenizer.decode(played.sample.only_row.response_ids_T, skip_special_tokens=False)


def call(name: str, **arguments: Any) -> str:
    return CALL.format(name, json.dumps(arguments))


def test_calls_are_answered_in_their_order(play: Play) -> None:
    """Also those that cannot be made; what is said to the model is masked, and each turn is trained with its end."""
    turn = call("double", number=4) + call("halve", number=4) + call("double", number="4")
    played, script = play("tools", turn, "8")
    facts, sample = played.sample.facts, played.sample
    assert facts and (facts.end, facts.turns, facts.calls, facts.call_errors) == (
        "answered",
        2,
        3,
        2,
    )
    observed = script.tokenizer.decode(
        sample.only_row.response_ids_T[~sample.only_row.trained_T], skip_special_tokens=False
    )
    assert observed.index("8") < observed.index("no such tool") < observed.index("argument number")
    assert (
        sample.only_row.response_ids_T[sample.only_row.trained_T] == script.tokenizer.eos_token_id
    ).sum() == 2
    assert (
        facts.sampled_tokens == sample.only_row.trained_T.sum()
        and sample.text == "8"
        and sample.finished
    )
    assert not sample.only_row.engine_logp_T[~sample.only_row.trained_T].any()
    ((name, _, num_tokens),) = script.completed
    assert (name, num_tokens) == ("episode-0", len(sample.only_row.response_ids_T))
    assert played.reward_result is None, "the reward function decides"


def test_an_episode_is_taken_down(play: Play) -> None:
    """What was said, what was called with which result, and the reward of each turn."""
    turn = call("double", number=4) + call("halve", number=4)
    played, _ = play("tools", turn, call("end", number=3))
    first, second = played.sample.transcript
    # special tokens of this tokenizer
    words = turn.replace("<tool_call>", "").replace("</tool_call>", "")
    assert (first["role"], first["text"], first["reward"]) == ("assistant", words, 0.0)
    assert [(entry["name"], entry["arguments"], entry["error"]) for entry in first["calls"]] == [
        ("double", {"number": 4}, None), ("halve", None, "bad_call")
    ]  # fmt: skip
    assert first["calls"][0]["result"] == "8" and "no such tool" in first["calls"][1]["result"]
    assert (second["calls"][0]["result"], second["reward"]) == ("over", 3.0)
    rewards_T = played.sample.only_row.token_rewards_T
    assert rewards_T is not None and rewards_T[-1] == 3.0 == rewards_T.sum()
    episode = played.sample.episode
    assert episode and episode["turns"] == [first, second]
    assert (episode["calls"], episode["call_errors"], episode["end"]) == (3, 1, "done")


def test_a_rendered_history_begins_a_row_where_it_differs_from_what_was_sampled(play: Play) -> None:
    """Each row has one turn then, after the tokens that the template gives; each sampled token is in one row."""
    limits = {"row": {"opening": "begin"}, "max_turns": 3, "history": "render"}
    played, script = play("environment", "hm;one", "hm;two", "hm;three", forgets=True, **limits)
    sample, facts = played.sample, played.sample.facts
    assert facts and (facts.turns, len(sample.rows)) == (3, 3)
    decode = script.tokenizer.decode
    prompts = [decode(list(row.prompt_ids)) for row in sample.rows]
    assert "<assistant>one<eos>" in prompts[1] and prompts[2].startswith(prompts[1])
    assert "<assistant>two<eos>" in prompts[2] and "<assistant>hm" not in prompts[2]
    assert [decode(row.response_ids_T) for row in sample.rows] == [
        "hm;one<eos>",
        "hm;two<eos>",
        "hm;three<eos>",
    ]
    assert facts.sampled_tokens == sum(row.num_trained for row in sample.rows)
    assert [row.token_rewards_T is not None and row.token_rewards_T[-1] for row in sample.rows] == [
        0.25
    ] * 3


@pytest.mark.parametrize("kind", ["environment", "tools"])
def test_a_rendered_history_is_one_row_where_the_template_keeps_all(play: Play, kind: str) -> None:
    turns = (
        [call("double", number=4), call("double", number="x"), "8"]
        if kind == "tools"
        else ["one", "two", "three"]
    )
    rows = [
        play(kind, *turns, max_turns=3, history=history)[0].sample
        for history in ("append", "render")
    ]
    assert rows[0].facts and rows[1].facts and rows[0].facts.turns == rows[1].facts.turns == 3
    np.testing.assert_array_equal(rows[0].only_row.response_ids_T, rows[1].only_row.response_ids_T)
    np.testing.assert_array_equal(rows[0].only_row.trained_T, rows[1].only_row.trained_T)


def test_calls_that_hang_end_with_the_time_of_their_episode(
    play: Play, threads: dict[str, EnvironmentThread]
) -> None:
    """Eight seconds of calls, one after the other, in an episode that has one and a half."""
    before = threads["tools"].num_ended
    played, _ = play(
        "tools", call("hang", number=1) * 8, "8", timeout_s=1.5, turn_tokens=500, max_tokens=600
    )
    facts = played.sample.facts
    assert threads["tools"].num_ended - before < 4, (
        "those that wait for their turn are not made any more"
    )
    assert facts and (facts.end, facts.turns, facts.calls, facts.call_errors) == (
        "timeout",
        1,
        8,
        8,
    )
    assert facts.tool_s < 6 and played.reward_result is None, "the reward function decides"
    results = {(entry["result"], entry["error"]) for entry in played.sample.transcript[0]["calls"]}
    assert results == {
        ("hang was given up, because episode.timeout_s (1.5 s) had passed.", "timeout")
    }


def test_calls_that_fail_by_their_tool_are_in_the_summary(play: Play) -> None:
    """Those of all samples, of which samples.jsonl shows the first ones; a call that the model should mend is not."""
    broken = call("halve", number=1) + call("double", number="x") + call("refuse", number=3)
    played = [
        play("tools", broken, "no")[0].sample,
        *(play("tools", call("hang", number=1), "no")[0].sample,) * 2,
    ]
    assert [sample.facts.call_errors for sample in played if sample.facts] == [3, 1, 1]
    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._reward_workers = SimpleNamespace(take_worked_s=lambda: None)
    worker._runtime = None
    worker._reward = RewardConfig()
    worker._num_transcripts = 1
    worker._take_faults = dict  # no worker process has a part in this

    async def generated(*_: Any) -> Generated:
        return Generated(played, [RewardResult(1.0, True), RewardResult(0.0, False), None])

    worker._generate = generated
    summary, _ = asyncio.run(worker.sample(Prompt("row 1", "", (1, 2), ""), Sampling(3, 9)))
    assert summary.failed_calls == ("hang took longer than 1 s.",) * 2
    assert (len(summary.transcripts), summary.num_dropped) == (1, 1), (
        "that of a sample without a verdict too"
    )
    assert summary.failures[0].startswith(
        "the environment gave no reward (its episode ended as answered) on response"
    )
    worker._num_transcripts = 0
    summary, _ = asyncio.run(worker.sample(Prompt("row 1", "", (1, 2), ""), Sampling(3, 9)))
    assert summary.transcripts == ()


@pytest.mark.parametrize("turn", [call("double", number=4), "8"], ids=["calls", "answers"])
def test_a_turn_is_sampled_to_its_end_and_its_calls_are_in_time_or_not_made(
    play: Play, turn: str
) -> None:
    played, script = play("tools", turn, "8", timeout_s=0.6, turn_s=0.7)
    facts = played.sample.facts
    ((_, _, num_tokens),) = script.completed
    assert facts and facts.turns == 1 and num_tokens == facts.sampled_tokens
    assert text_of(script, played) == f"{turn}<eos>"
    assert (facts.end, facts.call_errors) == (("answered", 0) if turn == "8" else ("timeout", 1))


def test_the_time_of_an_episode_ends_its_environment_too(play: Play) -> None:
    """What it was worth is still asked for, where it had begun."""
    played, _ = play("environment", "hello", "again", row={"fails": "reply hangs"}, timeout_s=0.8)
    assert played.sample.facts and (played.sample.facts.end, played.sample.facts.turns) == (
        "timeout",
        1,
    )
    assert played.reward_result == RewardResult(0.5, False)


@pytest.mark.parametrize(
    ("kind", "turn", "row"),
    [
        ("tools", call("say", words=MARKUP), {}),
        ("environment", "hello", {"says": MARKUP}),
    ],
)
def test_what_is_said_to_the_model_is_cut_and_is_no_markup(
    play: Play, kind: str, turn: str, row: dict[str, str]
) -> None:
    played, script = play(kind, turn, "ok", row=row, max_turns=2, max_observation_tokens=30)
    trained_T = played.sample.only_row.trained_T
    observed = script.tokenizer.decode(
        played.sample.only_row.response_ids_T[~trained_T], skip_special_tokens=False
    )
    assert (
        "tokens left out" in observed and "< eos>" in observed and observed.count("<eos>") == 1
    ), "the result's own end"


@pytest.mark.parametrize(
    ("turns", "limits", "end"),
    [
        ([call("double", number=1)] * 2, {"max_turns": 2}, "max_turns"),
        ([call("double", number=1)] * 9, {"max_turns": 9, "max_tokens": 150}, "max_tokens"),
        (["halves of..."], {}, "cut"),
        ([call("halve", number=1)] * 4, {}, "bad_calls"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_limit_ends_an_episode_by_its_name(
    play: Play, turns: list[str], limits: dict[str, Any], end: str
) -> None:
    played, script = play("tools", *turns, **limits)
    assert played.sample.facts and played.sample.facts.end == end and not played.sample.finished
    trained_T = played.sample.only_row.trained_T
    assert trained_T[-1], "a row ends with what the model sampled"
    assert (
        len(played.sample.only_row.response_ids_T) <= limits.get("max_tokens", 400)
        and len(script.completed) == 1
    )


def test_an_environment_answers_rewards_and_opens(play: Play) -> None:
    played, script = play("environment", "hello", "again", row={"opening": "begin"}, max_turns=2)
    sample = played.sample
    assert played.reward_result == RewardResult(0.5, False)
    assert "begin" in script.tokenizer.decode(
        list(sample.only_row.prompt_ids)
    ) and "you said hello" in text_of(script, played)
    assert (
        sample.only_row.token_rewards_T is not None and sample.only_row.token_rewards_T.sum() == 0.5
    )
    assert [(entry["role"], entry["text"], entry["reward"]) for entry in sample.transcript] == [
        ("user", "begin", 0.0),
        ("assistant", "hello", 0.25), ("user", "you said hello", 0.0),
        ("assistant", "again", 0.25), ("user", "you said again", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words", "turns"),
    [
        ({"fails": "reset"}, "reset raised ValueError: no row", 0),
        ({"fails": "reply"}, "reply raised ValueError: no words", 1),
        ({"fails": "reward"}, "reward raised ValueError: no idea", 2),
        ({"opening": "x" * 100}, "with the text of reset the prompt has", 0),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_failing_environment_is_a_failed_reward_result(
    play: Play, row: Any, words: str, turns: int
) -> None:
    """Of this episode alone, whose process goes on."""
    played, script = play("environment", "hello", "again", row=row, max_turns=2)
    assert isinstance(played.reward_result, Failure) and words in played.reward_result.words
    assert played.sample.facts and (played.sample.facts.end, played.sample.facts.turns) == (
        "environment",
        turns,
    )
    assert len(script.completed) == 1
    assert play("environment", "hello", "again", max_turns=2)[0].reward_result == RewardResult(
        0.5, False
    )


def test_what_an_episode_asks_of_the_engine_is_paced(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def noted(work: Any) -> Any:
        seen.append(work.__name__)
        return await work

    monkeypatch.setattr("megarl.episodes.rows.paced", noted)
    play("environment", "hello", max_turns=1)
    assert seen == ["begin", "turn"]
