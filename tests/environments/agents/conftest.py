"""Agents in real worker processes, none of which outlives its test, and a handler that answers by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.environments.agents.agent_processes import AgentSettings
from megarl.environments.agents.agent_thread import AgentThread
from megarl.environments.agents.chat import ChatAnswer, ChatRefused, ChatRequest, EpisodeOver
from megarl.types.reward_result import RewardResult


class Scripted:
    """Answers by the last message: an echo, or what `_special` says. together: requests that wait for each other."""

    def __init__(self, together: int = 1) -> None:
        self.requests: list[ChatRequest] = []
        self.open, self.most_open, self.cancelled = 0, 0, 0
        self._together, self._changed = together, asyncio.Condition()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        self.requests.append(request)
        try:
            await self._count(1)
            return await self._answer(request.messages[-1]["content"])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            await self._count(-1)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self.open += change
            self.most_open = max(self.most_open, self.open)
            self._changed.notify_all()

    async def _answer(self, text: str) -> ChatAnswer:
        match text:
            case "refuse":
                raise ChatRefused("no")
            case "over":
                raise EpisodeOver("max_turns is reached")
            case "fail":
                raise ConnectionError("the engine has ended")
            case "never":
                await asyncio.Event().wait()
            case "when_open":
                await self.until(lambda: self.open == 2)
            case "when_cancelled":
                await self.until(lambda: self.cancelled == 1)
        await self.until(lambda: self.most_open >= self._together)
        return ChatAnswer(f"heard {text}", (), "stop", 1, 1)


class Agents:
    """An AgentThread, and a short way to run its agent."""

    def __init__(self, settings: AgentSettings) -> None:
        self.thread = AgentThread(settings)

    async def run(
        self, do: str, handler: Scripted | None = None, *, timeout_s: float = 60.0, **row: Any
    ) -> Any:
        """The reward, or None. The row is `do` and the other keywords."""
        reward_result = await self.reward_result(do, handler, timeout_s=timeout_s, **row)
        return reward_result and reward_result.reward

    async def reward_result(
        self, do: str, handler: Scripted | None = None, *, timeout_s: float = 60.0, **row: Any
    ) -> RewardResult | None:
        prompt = [{"role": "user", "content": "prompt"}]
        handler = handler or Scripted()
        return await self.thread.run(
            {"do": do, **row}, prompt, 5, handler, row.get("access"), timeout_s
        )


@pytest.fixture(scope="module")
def build() -> Iterator[Callable[..., Agents]]:
    """Build agents with settings; afterwards none of the processes that were started is there."""
    before = set(psutil.Process().children(recursive=True))
    built: list[Agents] = []

    def make(agent: str = "odd_agents:run", **settings: Any) -> Agents:
        built.append(
            Agents(AgentSettings(**{"agent": agent, "workers": 1, "start_s": 120.0, **settings}))
        )
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield make
    for started in built:
        started.thread.shutdown()
        assert not started.thread.pids()
    assert not set(psutil.Process().children(recursive=True)) - before, (
        "every process is ended and reaped"
    )


@pytest.fixture(scope="module")
def agents(build: Callable[..., Agents]) -> Agents:
    """One process."""
    return build(arguments={"worth": 0.25}, memory_mb=256)
