"""Agents in real processes that do as they should: they ask, are refused, and give verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.loading import load_recipe
from megarl.environments.agents.agent_processes import AgentSettings
from megarl.environments.agents.agent_thread import AgentFailure, agent_settings
from megarl.environments.agents.chat import Access
from megarl.environments.agents.chat_client import AT_ONCE
from megarl.types.reward_result import RewardResult
from tests.environments.agents.conftest import Agents, Scripted

Build = Callable[..., Agents]
ROOT = Path(__file__).resolve().parents[3]


def test_an_agent_asks_and_gives_a_reward_result(agents: Agents) -> None:
    async def scenario() -> tuple[RewardResult | None, Scripted]:
        handler = Scripted()
        access = Access("http://127.0.0.1:1/v1", "secret", "/tmp/socket")
        tools = [{"type": "function", "function": {"name": "add"}}]
        row = {"do": "play", "say": "hello", "tools": tools}
        prompt = [{"role": "user", "content": "prompt"}]
        return await agents.thread.run(row, prompt, 5, handler, access, 60.0), handler

    reward_result, handler = asyncio.run(scenario())
    words = ["prompt", "hello", "heard hello", "again", "heard again", "again"]
    details = [*words, 5, "http://127.0.0.1:1/v1", "secret", "/tmp/socket", 1, [0.25]]
    assert reward_result == RewardResult(0.25, True, repr(details))
    assert [len(request.messages) for request in handler.requests] == [2, 4]
    assert handler.requests[1].messages[2] == {"role": "assistant", "content": "heard hello"}
    assert handler.requests[0].tools == [{"type": "function", "function": {"name": "add"}}]
    assert "secret" not in repr(Access("url", "secret", "socket"))


def test_values_that_are_reward_results(agents: Agents) -> None:
    async def scenario() -> list[Any]:
        return [
            await agents.reward_result("return", value=value) for value in ("none", "int", "true")
        ]

    assert asyncio.run(scenario()) == [None, RewardResult(1.0, True), RewardResult(1.0, True)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"do": "return", "value": "object"}, "returned <object object at"),
        ({"do": "return", "value": "nan"}, "returned nan"),
        ({"do": "return", "value": "text"}, "returned '1'"),
        ({"do": "raise", "error": "key"}, "raised KeyError: 'x'"),
        ({"do": "raise", "error": "exit"}, "raised SystemExit: 3"),
        ({"do": "raise", "error": "task_exit"}, "raised SystemExit: 3"),
        ({"do": "raise", "error": "cancelled"}, "raised CancelledError:"),
        ({"do": "where", "circle": None}, "cannot be sent its row (Circular reference detected)"),
    ],
)
def test_a_failure_says_what_the_agent_did(agents: Agents, row: dict[str, Any], words: str) -> None:
    if "circle" in row:
        row["circle"] = row
    pids = agents.thread.pids()
    with pytest.raises(AgentFailure) as caught:
        asyncio.run(agents.run(**row))
    assert str(caught.value).startswith(words)
    assert agents.thread.pids() == pids


def test_sub_agents_ask_at_once(agents: Agents) -> None:
    result = asyncio.run(_with(agents, Scripted(together=2), "together", names=["a", "b"]))
    assert result == RewardResult(0.5, False, "heard a heard b")


def test_plain_code_in_a_thread_asks_too(agents: Agents) -> None:
    assert asyncio.run(_with(agents, Scripted(), "in_threads")) == RewardResult(
        0.25, True, "heard deep"
    )


def test_requests_that_cannot_be_answered_are_refused_in_a_sentence(agents: Agents) -> None:
    reward_result = asyncio.run(_with(agents, Scripted(), "refused"))
    assert reward_result and reward_result.answer
    words = reward_result.answer.split("|")
    assert words[:2] == ["messages is not a list of dicts"] * 2
    assert words[2] == "the request is no JSON (Circular reference detected)"
    assert "surrogates not allowed" in words[3] and "float values are not JSON" in words[4]
    assert words[5] == "the request is no JSON (Object of type object is not JSON serializable)"
    assert words[6].startswith("the request has 167772") and words[6].endswith(
        "16777216 are the most"
    )
    assert words[7:] == ["no", "heard"]


def test_an_episode_that_is_over_stays_over(agents: Agents) -> None:
    handler = Scripted()
    reward_result = asyncio.run(_with(agents, handler, "over"))
    assert reward_result == RewardResult(0.25, True, "|".join(["max_turns is reached"] * 3))
    assert len(handler.requests) == 1, "the process itself refuses those that follow"
    assert asyncio.run(_with(agents, Scripted(), "let_over_pass")) is None


def test_requests_that_nobody_waits_for_are_cancelled(agents: Agents) -> None:
    handler = Scripted()
    assert asyncio.run(_with(agents, handler, "impatient")) == RewardResult(0.25, False)
    assert handler.cancelled == 2 and handler.open == 0


def test_what_the_handler_raises_is_the_callers(agents: Agents) -> None:
    async def scenario() -> None:
        handler = Scripted(together=2)
        with pytest.raises(ConnectionError, match="the engine has ended"):
            await agents.run("together", handler, names=["never", "fail"])
        assert handler.open == 0 and handler.cancelled == 1

    asyncio.run(scenario())


def test_a_caller_that_is_cancelled_leaves_no_request(agents: Agents) -> None:
    async def scenario() -> None:
        handler = Scripted()
        running = asyncio.create_task(agents.run("together", handler, names=["never", "never"]))
        await handler.until(lambda: handler.open == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert handler.open == 0 and handler.cancelled == 2
        assert await agents.run("where") in agents.thread.pids()

    asyncio.run(scenario())


def test_a_process_has_many_runs_and_the_others_wait(agents: Agents) -> None:
    async def scenario() -> int:
        handler = Scripted(together=AT_ONCE)
        runs = [
            agents.run("together", handler, names=[str(number)]) for number in range(AT_ONCE + 6)
        ]
        assert await asyncio.gather(*runs) == [0.5] * len(runs)
        return handler.most_open

    assert asyncio.run(scenario()) == AT_ONCE


def test_it_is_told_when_a_run_begins(agents: Agents) -> None:
    """Not while it waits for a place in a process."""

    async def scenario() -> None:
        handler, begun = Scripted(), list[int]()

        def run(number: int) -> asyncio.Task[Any]:
            row, began = (
                {"do": "together", "names": ["never"]},
                lambda: begun.append(len(handler.requests)),
            )
            return asyncio.ensure_future(
                agents.thread.run(row, [], number, handler, None, 60.0, began)
            )

        runs = [run(number) for number in range(AT_ONCE + 1)]
        await handler.until(lambda: handler.open == AT_ONCE)
        assert len(begun) == AT_ONCE and begun[0] == 0, "before its first request"
        for task in runs:
            task.cancel()
        await asyncio.wait(runs)

    asyncio.run(scenario())


def test_what_agents_print_goes_to_standard_error(
    capfd: pytest.CaptureFixture[str], build: Build
) -> None:
    """At once: the process is killed when it is not needed any more."""
    assert asyncio.run(build().run("print")) == 1.0
    assert capfd.readouterr() == ("", "an agent has printed this, and read: ''\n")


def test_the_settings_are_the_recipes() -> None:
    keys = {
        "agent": "my_agent:run",
        "arguments": {"x": 1},
        "max_tokens": 99,
        "workers": 3,
        "memory_mb": 7,
    }
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [f"episode={json.dumps(keys)}"])
    assert agent_settings(recipe) == AgentSettings(
        "my_agent:run", {"x": 1}, 3, 7, recipe.run.timeout_s
    )
    assert agent_settings(recipe, workers=1).workers == 1


async def _with(agents: Agents, handler: Scripted, do: str, **row: Any) -> RewardResult | None:
    return await agents.reward_result(do, handler, **row)
