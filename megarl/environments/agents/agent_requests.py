"""The requests of one run of an agent, answered in the event loop that asked for the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from megarl.environments.agents.chat import ChatHandler, ChatRefused, ChatRequest, EpisodeOver

Outcome = Literal["answer", "refused", "over"]
Reply = Callable[[Outcome, object], object]  # called with the assistant's message or words, once


class AgentRequests:
    """Lets the handler answer each request in a task of its own, in the loop in which this is made.

    `begin`, `ask` and `drop` may be called in any thread. Where the handler raises something other than ChatRefused
    and EpisodeOver, the first such exception is kept as `error`, and `on_error` is called.
    """

    def __init__(self, handler: ChatHandler, on_begin: Callable[[], object]) -> None:
        """on_begin: as of `AgentThread.run`."""
        self._handler = handler
        self._on_begin = on_begin
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the request's number
        self._is_closed = False
        self.error: BaseException | None = None
        self.on_error: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """A process begins with the run, perhaps anew."""
        self._call_soon(self._on_begin)

    def ask(self, number: int, request: ChatRequest, reply: Reply) -> None:
        """Answer a request later."""
        self._call_soon(self._start, number, request, reply)

    def drop(self, number: int) -> None:
        """The agent does not wait for an answer any more."""
        self._call_soon(self._cancel, number)

    async def close(self) -> None:
        """Cancel the requests that are open, and wait until their handlers have ended, even if this is cancelled."""
        self._is_closed = True
        interrupt: asyncio.CancelledError | None = None
        for task in self._tasks.values():
            task.cancel()
        while self._tasks:
            try:
                await asyncio.wait(self._tasks.values())
            except asyncio.CancelledError as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def _call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _start(self, number: int, request: ChatRequest, reply: Reply) -> None:
        if (
            self._is_closed or number in self._tasks
        ):  # the agent may have written the message itself
            return
        task = self._loop.create_task(self._answer(request, reply))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()

    async def _answer(self, request: ChatRequest, reply: Reply) -> None:
        try:
            answer = await self._handler.answer(request)
        except ChatRefused as error:
            reply("refused", str(error))
        except EpisodeOver as error:
            reply("over", str(error))
        except BaseException as error:
            task = asyncio.current_task()
            if task and not task.cancelling():  # else it was cancelled, and nobody waits for it
                self.error = self.error or error
                self.on_error()
        else:
            reply("answer", answer.message())
