"""Episodes in phases, with real environments and turns that a script gives: as those that are sampled at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.episode import EpisodeConfig
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.rows import EpisodeResult
from megarl.episodes.tool_calls import CallFormat
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.samples import accounting
from megarl.types import EpisodeProgress, Prompt, Sample, merged_parts
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling
from scripts.make_tiny_moe import make_tokenizer
from tests.episodes.sampler import ScriptedSampler

pytestmark = pytest.mark.slow  # the reader of calls is SGLang's

CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
KINDS = {
    "walk": {"environment": "tests.episodes.walk:Walk"},
    "once": {"environment": "tests.episodes.walk:OnlyOnce"},
    "tools": {"tools": ("tests.episodes.walk:double",)},
}
ENGINES = 2
Threads = Callable[[str], list[EnvironmentThread]]


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    """The environments of two engines, of a kind."""
    threads_by_kind: dict[str, list[EnvironmentThread]] = {}

    def of_kind(kind: str) -> list[EnvironmentThread]:
        if kind not in threads_by_kind:
            settings = EnvironmentSettings(**KINDS[kind], workers=1)
            threads_by_kind[kind] = [EnvironmentThread(settings) for _ in range(ENGINES)]
        return threads_by_kind[kind]

    yield of_kind
    for pair in threads_by_kind.values():
        for thread in pair:
            thread.shutdown()


class Model(ScriptedSampler):
    """Samples turns that are given, by what the context has of them: a token's logprob and expert tell its place."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self.turns = list(turns)
        self.version = 0
        self.begin_of_turn = tokenizer.convert_tokens_to_ids("<assistant>")

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        before = list(context_ids)
        last = len(before) - before[::-1].index(self.begin_of_turn)
        text = self.turns[before.count(self.begin_of_turn) - 1]
        whole = self.ids(text)
        whole = whole if text.endswith("...") else [*whole, self.tokenizer.eos_token_id]
        ids = whole[len(before) - last :][: sampling.max_tokens]
        places = np.arange(len(before), len(before) + len(ids))
        experts = np.arange(rows, len(before) + len(ids) - 1).astype(np.int16).reshape(-1, 1, 1)
        return self.sample(
            before,
            ids,
            finished=len(before) - last + len(ids) == len(whole) and not text.endswith("..."),
            engine_logp_T=(-places / 1000).astype(np.float32),
            version=self.version,
            routed_experts=experts,
        )


@dataclass
class Played:
    """An episode after each of its phases."""

    phases: list[EpisodeResult]
    model: Model
    prompt: Prompt

    @property
    def last(self) -> Sample:
        return self.phases[-1].sample

    @property
    def opened(self) -> list[EpisodeProgress]:
        return [phase.sample.open_episode for phase in self.phases if phase.sample.open_episode]


def as_stored(sample: Sample) -> Sample:
    """With what lies between two phases as JSON has it."""
    stored = json.loads(json.dumps(asdict(sample.open_episode))) if sample.open_episode else None
    return replace(sample, open_episode=EpisodeProgress(**stored) if stored else None)


def play(
    pair: list[EnvironmentThread],
    turns: Sequence[str],
    phases: Sequence[int | None],
    row: Any = None,
    between: Callable[[Sample], None] = lambda sample: None,
    forgets: bool = False,
    **limits: Any,
) -> Played:
    """phases: tokens of each, the last of all that follow. forgets: the template leaves out a part of earlier turns."""
    tokenizer: Any = make_tokenizer(tools=True)
    if forgets:
        later = "message.content.split(';')[-1 if message.role == 'assistant' else 0]"
        tokenizer.chat_template = str(tokenizer.chat_template).replace("message.content", later)
    schemas = pair[0].schemas
    turn_tokenizer = TurnTokenizer(tokenizer, [tokenizer.eos_token_id], schemas)
    calls = CallFormat.find(tokenizer, [tokenizer.eos_token_id], schemas)
    config = EpisodeConfig.model_validate({"max_tokens": 300, "max_turns": 4} | limits)
    model = Model(tokenizer, turns)
    prompt = Prompt("row 1", "", tuple(turn_tokenizer.first("go")), "", row or {}, "go")
    played = Played([], model, prompt)
    sample: Sample | None = None
    while sample is None or sample.is_open:
        assert len(played.phases) < 400
        at = len(played.phases)
        runner = EpisodeRunner(
            config, model, pair[at % ENGINES], turn_tokenizer, calls, max_prompt_tokens=100
        )
        sampling = Sampling(1, 100, stream=(1, 2), phase_tokens=phases[min(at, len(phases) - 1)])
        assigned = accounting.longest_row(sample) if sample else 0
        result = asyncio.run(runner.run(prompt, sampling, 0, sample, assigned))
        accounting.check(prompt, [result.sample])
        played.phases.append(result)
        between(result.sample)
        sample, model.version = as_stored(result.sample), model.version + 1
    return played


def call(name: str, **arguments: Any) -> str:
    return CALL.format(name, json.dumps(arguments))


def same(one: Sample, other: Sample) -> None:
    """But for the versions of the tokens, the seconds, and what the engine had in its cache."""
    assert one.facts and other.facts
    apart = {"tool_s": 0.0, "reusable_tokens": 0, "cached_tokens": 0}
    assert replace(one.facts, **apart) == replace(other.facts, **apart)
    assert one.transcript == other.transcript
    assert (one.text, one.finished, len(one.rows)) == (other.text, other.finished, len(other.rows))
    for row, whole in zip(one.rows, other.rows, strict=True):
        for name in (
            "prompt_ids",
            "response_ids_T",
            "engine_logp_T",
            "trained_T",
            "token_rewards_T",
            "routed_experts",
        ):
            np.testing.assert_array_equal(getattr(row, name), getattr(whole, name))
        assert sum(part.num_tokens for part in row.parts) == len(row.response_ids_T)
        assert row.routed_experts is not None
        assert row.routed_experts.ravel().tolist() == list(range(len(row.routed_experts)))


STEPS = [call("step", count=2) + call("step", count=3), call("ste"), call("step", count=1), "done"]


@pytest.mark.parametrize(
    ("kind", "turns", "limits", "tokens"),
    [
        ("walk", STEPS, {"row": {"opening": "begin"}}, 7),
        ("walk", STEPS, {"row": {"opening": "begin"}}, 40),
        ("walk", ["one", "two", "three", "four"], {"max_turns": 3}, 1),
        ("walk", [call("step", count=1)] * 9, {"max_turns": 9, "max_tokens": 150}, 19),
        (
            "walk",
            ["hm;one", "hm;two", call("step", count=1), "hm;three"],
            {"history": "render", "forgets": True},
            3,
        ),
        (
            "tools",
            [call("double", number=4), call("double", number="x"), "8"],
            {"history": "render"},
            7,
        ),
        ("tools", [call("double", number=4), "eight and..." + "e" * 200 + "..."], {}, 40),
    ],
    ids=["calls", "long", "max_turns", "max_tokens", "render", "tools", "cut"],
)
def test_an_episode_in_phases_is_that_of_one_phase(
    threads: Threads, kind: str, turns: list[str], limits: dict[str, Any], tokens: int
) -> None:
    """Wherever it is left: in a turn, or after what was said; each time another engine goes on with it."""
    whole, parts = (
        play(threads(kind), turns, [None], **limits),
        play(threads(kind), turns, [tokens], **limits),
    )
    assert len(whole.phases) == 1 and whole.last.facts
    same(parts.last, whole.last)
    assert parts.phases[-1].reward_result == whole.phases[-1].reward_result
    sampled = whole.last.facts.sampled_tokens
    assert len(parts.phases) == -(-sampled // tokens) or sampled % tokens == 0, (
        "each phase gives as many as it may"
    )
    trained = merged_parts([accounting.trained_parts(row) for row in parts.last.rows])
    versions = [part.version for part in trained]
    assert versions == list(range(-(-sampled // tokens)))
    assert all(phase.reward_result is None for phase in parts.phases[:-1])
    grown = sum(response for _, _, response in parts.model.completed)
    assert grown >= max(len(row.response_ids_T) for row in whole.last.rows), (
        "said messages that no turn followed too"
    )


def test_a_slow_tool_leaves_its_own_episode_open(threads: Threads, tmp_path: Path) -> None:
    """Before the call, which is made again in the next phase; what was done before is not told twice."""
    gate, turns = tmp_path / "gate", [call("step", count=2), call("fetch"), "done"]

    def open_gate(sample: Sample) -> None:
        opened = sample.open_episode
        if opened and opened.following == "answer" and opened.account["turns"] == 2:
            gate.touch()

    row = {"gate": str(gate)}
    slow = play(
        threads("walk"), turns, [100], row, open_gate, phase_tool_s=0.5, max_turns=3, max_tokens=299
    )
    assert gate.exists() and len(slow.phases) >= 2
    same(slow.last, play(threads("walk"), turns, [None], row, max_turns=3, max_tokens=299).last)
    assert "found after 3" in slow.model.tokenizer.decode(slow.last.only_row.response_ids_T)
    assert slow.last.facts and slow.last.facts.tool_s >= 0.5, (
        "the seconds that were waited in vain are counted"
    )


def test_an_episode_has_so_many_phases_and_no_more(threads: Threads, tmp_path: Path) -> None:
    """As its longest would take: then it ends, and its environment says what it was worth."""
    turns, row = [call("step", count=2), call("fetch"), "done"], {"gate": str(tmp_path / "gate")}
    played = play(threads("walk"), turns, [100], row, phase_tool_s=0.5, max_turns=3)
    assert len(played.phases) == 3 and played.phases[-1].reward_result == RewardResult(0.5, False)
    assert played.last.facts and played.last.facts.end == "timeout" and not played.last.finished
    unbegun = play(threads("walk"), turns, [150], {"closed": True}, phase_tool_s=0.1)
    assert [progress.following for progress in unbegun.opened] == [
        "begin"
    ] and unbegun.last.num_trained == 0
    reward_result = unbegun.phases[-1].reward_result
    assert (
        isinstance(reward_result, Failure)
        and "reset took longer than episode.phase_tool_s (0.1 s)" in reward_result.words
    )


def test_the_seconds_of_all_phases_are_those_of_the_episode(
    threads: Threads, tmp_path: Path
) -> None:
    """Of tools that are called, and of reset."""
    turns, row = [call("step", count=2), call("fetch"), "done"], {"gate": str(tmp_path / "gate")}
    played = play(threads("walk"), turns, [100], row, phase_tool_s=1, timeout_s=1.7, max_turns=3)
    assert len(played.phases) == 2 and played.phases[-1].reward_result == RewardResult(0.5, False)
    assert played.last.facts and (played.last.facts.end, played.last.facts.turns) == ("timeout", 2)
    unbegun = play(threads("walk"), turns, [150], {"closed": True}, phase_tool_s=1, timeout_s=1.7)
    assert len(unbegun.phases) == 2
    assert unbegun.phases[-1].reward_result == Failure(
        "episode.timeout_s (1.7 s) had passed before the end of reset"
    )


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("once", STEPS),
        ("walk", [call("where"), call("step", count=1), call("step", count=1), "done"]),
    ],
    ids=["not replayable", "another result"],
)
def test_an_environment_that_cannot_go_on_begins_anew(
    threads: Threads, kind: str, turns: list[str]
) -> None:
    """From the prompt: what was sampled is dropped and counted, and the next phase has all of its tokens."""
    played = play(threads(kind), turns, [60, 298], {"opening": "begin"}, max_tokens=299)
    facts, lost = played.last.facts, 60
    assert len(played.phases) == 2 and facts and (facts.begun_anew, facts.dropped_anew) == (1, lost)
    assert facts.dropped_unawaited == 0
    assert facts.sampled_tokens == lost + played.last.num_trained and facts.end == "max_turns"
    assert [part.version for part in played.last.only_row.parts] == [1]
    assert (facts.turns, played.last.prefills) == (4, 4)
