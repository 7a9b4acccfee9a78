"""The agents of an engine's episodes as its other threads see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import astuple

from megarl.config import Recipe
from megarl.environments.agents.agent_processes import AgentSettings, AgentWorkers, overdue
from megarl.environments.agents.agent_requests import AgentRequests
from megarl.environments.agents.chat import Access, ChatHandler
from megarl.isolation.loop_thread import LoopThread
from megarl.isolation.pool import start_pool
from megarl.types.conditions import RunningJob
from megarl.types.json_objects import Columns, Message
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.worker_faults import WorkerFaults


class AgentFailure(Exception):
    """The agent of an episode has failed, and not the model. The text says in a few words what it did."""


class AgentTimeout(AgentFailure):
    """The agent took longer than its episode may."""


def agent_settings(
    recipe: Recipe, workers: int | None = None, *, prepares: bool = True
) -> AgentSettings:
    """workers: in place of the recipe's. prepares: as of `AgentSettings`."""
    episode = recipe.episode
    assert episode and episode.agent
    return AgentSettings(
        agent=episode.agent,
        arguments=episode.arguments,
        workers=workers or episode.workers,
        memory_mb=episode.memory_mb,
        start_s=recipe.run.timeout_s,
        prepares=prepares,
    )


class AgentThread:
    """The processes of agents, in a thread with a loop of its own.

    The constructor waits until the processes have loaded the agent. Raises UserError when it cannot be used.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._thread = LoopThread("agents")
        self._workers = start_pool(self._thread, lambda: AgentWorkers(settings))

    def take_faults(self) -> WorkerFaults:
        """The faults of the worker processes since the last call."""
        return self._workers.take_faults()

    async def running(self) -> list[RunningJob]:
        """The runs that the processes have; may be awaited in any loop."""
        return await self._thread.run(self._workers.running())

    def pids(self) -> list[int]:
        """The worker processes."""
        return self._workers.pids()

    async def run(
        self,
        row: Columns,
        prompt: Sequence[Message],
        seed: int,
        handler: ChatHandler,
        access: Access | None,
        timeout_s: float,
        on_begin: Callable[[], object] = lambda: None,
    ) -> RewardResult | None:
        """Run the agent on a row, whose prompt are these messages: its reward result, or None where it gives none.

        None too where the agent has let EpisodeOver pass. `handler.answer` runs in the caller's loop, several at once,
        and is cancelled and awaited before this returns or raises. timeout_s: from the time that a process begins with
        the agent; on_begin: is called then in the caller's loop, and again where it begins anew. Raises AgentFailure,
        what the handler raises beside ChatRefused and EpisodeOver, and UserError when the processes cannot be started
        again.
        """
        prompt_messages = [dict(message) for message in prompt]
        access_fields = astuple(access) if access else None
        message = [dict(row), prompt_messages, seed, access_fields]
        requests = AgentRequests(handler, on_begin)
        running = self._workers.run(message, timeout_s, requests, has_asked=access is not None)
        work = asyncio.ensure_future(self._thread.run(running))
        requests.on_error = work.cancel
        try:
            result = await work
        except asyncio.CancelledError:
            if not requests.error:
                raise
            result = None
        finally:
            await requests.close()
        if requests.error:
            raise requests.error
        if isinstance(result, Failure):
            is_late = result == overdue(timeout_s)
            raise (AgentTimeout if is_late else AgentFailure)(result.words)
        return result

    def shutdown(self) -> None:
        """End and reap the processes, and cancel the runs; may be called again."""
        self._thread.end(self._workers.end())
