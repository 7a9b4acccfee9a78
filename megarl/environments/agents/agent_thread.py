"""The agents of an engine's episodes as its other threads see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from megarl.config import Recipe
from megarl.environments.agents.agent_processes import (
    AgentRun,
    AgentSettings,
    AgentWorkers,
    Outcome,
    overdue,
)
from megarl.environments.agents.chat import (
    Access,
    ChatHandler,
    ChatRefused,
    ChatRequest,
    EpisodeOver,
)
from megarl.isolation.loop_thread import LoopThread
from megarl.types.reward_result import Failure, RewardResult

_Reply = Callable[[AgentRun, int, Outcome, object], None]


class AgentFailure(Exception):
    """The agent of an episode has failed: it is not the model's error. The text says in a few words what it did."""


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
        self._workers = self._thread.make(lambda: AgentWorkers(settings))
        try:
            self._thread.submit(self._workers.start()).result()
        except BaseException:
            self.shutdown()
            raise

    def pids(self) -> list[int]:
        """The worker processes."""
        return self._workers.pids()

    async def run(
        self,
        row: Mapping[str, Any],
        prompt: Sequence[Mapping[str, Any]],
        seed: int,
        handler: ChatHandler,
        access: Access | None,
        timeout_s: float,
        on_begin: Callable[[], object] = lambda: None,
    ) -> RewardResult | None:
        """Run the agent on a row, whose prompt are these messages: its reward, or None where it gives none.

        None too where the agent has let EpisodeOver pass. `handler.answer` runs in the caller's loop, several at once,
        and is cancelled and awaited before this returns or raises. timeout_s: from the time that a process begins with
        the agent; on_begin: is called then in the caller's loop, and again where it begins anew. Raises AgentFailure,
        what the handler raises beside ChatRefused and EpisodeOver, and UserError when the processes cannot be started
        again.
        """
        message = [
            dict(row),
            [*map(dict, prompt)],
            seed,
            access and [access.url, access.key, access.socket],
        ]
        requests = _CallerRequests(
            handler, partial(self._thread.call_soon, self._workers.answer), on_begin
        )
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
            raise (
                AgentTimeout(result.words)
                if result == overdue(timeout_s)
                else AgentFailure(result.words)
            )
        return result

    def shutdown(self) -> None:
        """End and reap the processes, and cancel the runs; may be called again."""
        self._thread.end(self._workers.end())


class _CallerRequests:
    """Answers the requests of one run in the loop in which it was made: a `RequestHandler`."""

    def __init__(self, handler: ChatHandler, reply: _Reply, on_begin: Callable[[], object]) -> None:
        """reply: hands an answer to the thread of the processes. on_begin: as of `AgentThread.run`."""
        self._handler = handler
        self._reply = reply
        self._on_begin = on_begin
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.error: BaseException | None = None
        self.on_error: Callable[[], object] = lambda: None

    def begun(self) -> None:
        self._call_soon(self._on_begin)

    def ask(self, run: AgentRun, request: int, content: ChatRequest) -> None:
        self._call_soon(self._begin, run, request, content)

    def drop(self, request: int) -> None:
        self._call_soon(self._cancel, request)

    async def close(self) -> None:
        """Cancel the requests that are open, and wait until their handlers have ended, even if this is cancelled."""
        self._is_closed = True
        interrupt: asyncio.CancelledError | None = None
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def _call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _begin(self, run: AgentRun, request: int, content: ChatRequest) -> None:
        if self._is_closed:
            return
        task = self._loop.create_task(self._answer(run, request, content))
        self._open[request] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, request: int) -> None:
        if task := self._open.pop(request, None):
            task.cancel()

    async def _answer(self, run: AgentRun, request: int, content: ChatRequest) -> None:
        try:
            answer = await self._handler.answer(content)
        except ChatRefused as error:
            self._reply(run, request, "refused", str(error))
        except EpisodeOver as error:
            self._reply(run, request, "over", str(error))
        except BaseException as error:
            if request in self._open and not self._is_closed:  # it was not cancelled from here
                self.error = self.error or error
                self.on_error()
        else:
            self._reply(run, request, "answer", answer.message())
        finally:
            self._open.pop(request, None)
