"""Episodes of agents that fail, in real processes, with turns that a script gives: how they end, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import RewardConfig
from megarl.config.episode import EpisodeConfig
from megarl.environments.agents.agent_processes import AgentSettings
from megarl.environments.agents.agent_thread import AgentThread
from megarl.episodes.agent_runner import AgentRunner
from megarl.episodes.agent_tools import ToolSets
from megarl.episodes.rows import EpisodeResult
from megarl.episodes.runtimes import AgentRuntime
from megarl.rollout.worker import Generated, RolloutWorker
from megarl.samples import accounting
from megarl.tracking.run_log import RunLog
from megarl.types import GroupSummary, Prompt
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling
from tests.environments.agents import odd_agents
from tests.episodes.test_agent_episode import TOKENIZER, Script
from tests.tracking.test_run_log import plain, recipe_in

pytestmark = pytest.mark.slow  # the reader of calls is SGLang's

TURNS = {"first": "hello", "over": "again"}
ASKS, GOOD = {"ask_first": True}, {"do": "return", "value": "int", "ask_first": True}


@pytest.fixture(scope="module")
def agents() -> Iterator[AgentThread]:
    """One process; the agent does what its row says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(odd_agents.__file__).parent))
        thread = AgentThread(
            AgentSettings("odd_agents:run", workers=1, memory_mb=256, start_s=120.0)
        )
        yield thread
    thread.shutdown()
    assert not thread.pids()


def played(agents: AgentThread, *rows: dict[str, Any], **limits: Any) -> list[EpisodeResult]:
    """An episode on each row, one after the other; its account of tokens is checked."""
    config = EpisodeConfig.model_validate({"agent": "odd_agents:run", "max_tokens": 200} | limits)

    async def run() -> list[EpisodeResult]:
        script = Script(TURNS)
        runner = AgentRunner(config, script, agents, None, _tool_sets(), max_prompt_tokens=200)
        results = [
            await runner.run(_prompt(row), Sampling(1, 100, stream=(1, 2)), 0) for row in rows
        ]
        assert len(script.completed) == len(rows), "the engine has its place again"
        return results

    episodes = asyncio.run(run())
    for row, episode in zip(rows, episodes, strict=True):
        accounting.check(_prompt(row), [episode.sample])
    return episodes


def _tool_sets() -> ToolSets:
    return ToolSets(TOKENIZER, [TOKENIZER.eos_token_id])


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt("row 1", "", (1,), "", row, "go")


def end_of(one: EpisodeResult) -> tuple[str, int]:
    """The end of an episode, and how many turns the model took."""
    assert one.sample.facts
    return one.sample.facts.end, one.sample.facts.turns


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"do": "fill"}, "ran out of memory"),
        ({"do": "exit"}, "ended its process (exit code 7)"),
        ({"do": "raise", "error": "key"}, "raised KeyError: 'x'"),
        ({"do": "return", "value": "nan"}, "returned nan"),
        ({"do": "garbage", "text": "[1]"}, "wrote to the socket of its worker process"),
    ],
    ids=lambda value: value["do"] if isinstance(value, dict) else None,
)
def test_an_agent_that_fails_is_named_and_costs_its_own_episode(
    agents: AgentThread, row: dict[str, Any], words: str
) -> None:
    """What the model has said before is kept."""
    bad, good = played(agents, row | ASKS, GOOD)
    assert bad.reward_result == Failure(f"the agent {words}") and end_of(bad) == ("agent", 1)
    assert bad.sample.text == "hello" and not bad.sample.finished and bad.sample.num_trained
    assert good.reward_result == RewardResult(1.0, True) and end_of(good) == ("answered", 1)


def test_an_agent_that_hangs_ends_as_timeout(agents: AgentThread) -> None:
    """Which is a limit and no failure: the reward function decides."""
    late, good = played(agents, {"do": "hang"} | ASKS, GOOD, timeout_s=1.5)
    assert (
        late.reward_result is None and end_of(late) == ("timeout", 1) and not late.sample.finished
    )
    assert good.reward_result == RewardResult(1.0, True)


def test_an_agent_that_fails_after_a_limit_ends_as_the_limit(agents: AgentThread) -> None:
    (episode,) = played(agents, {"do": "fail_when_over"}, max_turns=3)
    assert episode.reward_result is None and end_of(episode) == ("max_turns", 3)


def test_an_episode_without_a_turn_is_a_failure(agents: AgentThread) -> None:
    """Whatever its agent has returned, there is nothing to learn from."""
    episodes = played(agents, {"do": "return", "value": "int"}, {"do": "hang"}, timeout_s=1.5)
    assert [episode.reward_result for episode in episodes] == [
        Failure("no turn of the model has reached the agent")
    ] * 2
    assert [end_of(episode) for episode in episodes] == [("answered", 0), ("timeout", 0)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"do": "exit"}, "the agent ended its process (exit code 7)"),
        ({"do": "hang"}, "the agent gave no reward (its episode ended as timeout)"),
    ],
    ids=["dies", "hangs"],
)
def test_the_user_reads_one_line_of_it(
    agents: AgentThread, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    """Where there is no reward function, which else decides about a timeout."""
    summary = scored(played(agents, GOOD, row | ASKS, timeout_s=1.5))
    assert summary.rewards_G.tolist() == [1.0] and summary.num_dropped == 1
    console, text = plain()
    with RunLog(recipe_in(tmp_path), console) as log, log.step(3) as record:
        record.failed([summary])
    lines = [line for line in text.getvalue().splitlines() if "agent" in line]
    refused = "step 3: 2 requests of agents were refused for a field or a path: seed (2)"
    assert lines == [
        f"step 3: 1 verdict failed, the first {words} on response 'hello' to row 1, answer ''",
        refused,
    ]


def scored(episodes: Sequence[EpisodeResult]) -> GroupSummary:
    """As the engine's actor scores a group of episodes, without a reward function."""

    async def generated(*_: Any) -> Generated:
        return Generated(
            [episode.sample for episode in episodes],
            [episode.reward_result for episode in episodes],
            {"seed": 2},
        )

    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._runtime = AgentRuntime.__new__(AgentRuntime)
    worker._reward = RewardConfig()
    worker._num_transcripts = 1
    worker._take_faults = dict  # no worker process has a part in this
    worker._reward_workers = SimpleNamespace(take_worked_s=lambda: None)
    worker._generate = generated
    summary, _ = asyncio.run(worker.sample(_prompt({}), Sampling(len(episodes), 100)))
    return summary
