"""The process that runs agents, started by `AgentProcess` through `megarl.isolation.entry`.

It reads and writes JSON lines on the socket that is its standard input and output. Input: first an object, the fields
of `AgentSettings`; then about a run, which has a number:

    [number, "run", row, prompt messages, seed, [url, key, socket] or null]
    [number, "cancel"]
    [number, "answer", request, message]     to a request of the run, which has a number too
    [number, "refused", request, words]      it raises ValueError in the agent
    [number, "over", request, words]         it raises EpisodeOver

Output: first `["ready"]`, or the error `[where, problem, hint]`; then

    [number, "chat", request, [messages, tools]]
    [number, "drop", request, null]          the agent does not wait for the answer any more
    [number, "cancelling"]                   the answer to "cancel"
    [number, "end", [reward, correct, answer] or null, is_spoiled]
    [number, "error", words, is_spoiled]
    ["service", name, event, words]          at any time: what a call of a service has met

A run is over with its "end" or "error". is_spoiled: the process should get no other run, because its memory is full or
because the agent left work behind that cannot be ended. The main thread reads the socket. Every run has a thread with
an event loop of its own, so that an agent that blocks holds up itself alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from megarl.environments.agents.agent_loading import Agent, load_agent
from megarl.environments.agents.chat import Access, EpisodeOver
from megarl.environments.agents.chat_client import AT_ONCE, Chat
from megarl.isolation.child import (
    MEMORY_FULL,
    OUT_OF_MEMORY,
    ParentSocket,
    as_line,
    free_spare_memory,
    limit_memory,
    share_heap,
    tell_service_events,
)
from megarl.printable import describe_error
from megarl.types.json_objects import Columns, JsonObject, Message
from megarl.types.reward_result import Failure, reward_result_of

_STACK_MB = 2  # of a thread, in place of the usual 8
_THREADS_OF_RUN = 2  # its own, and one more, in which the event loop looks up addresses
_LEAVE_S = 1.0  # in which tasks and threads that an agent leaves behind have to end


def main(parent: ParentSocket, spec: JsonObject) -> None:
    """Run agents until the parent closes the socket or ends."""
    share_heap()
    tell_service_events(lambda message: parent.write(as_line(message)))
    agent = load_agent(spec["agent"], spec["arguments"], prepares=spec["prepares"])
    threading.stack_size(_STACK_MB * 2**20)
    limit_memory(spec["memory_mb"] + AT_ONCE * _THREADS_OF_RUN * _STACK_MB)
    try:
        _AgentHost(parent, agent).serve()
    except MemoryError:
        os._exit(MEMORY_FULL)
    os._exit(0)  # without waiting for threads


class _AgentHost:
    """Starts a thread for each run that the parent asks for, and gives each run the messages about it."""

    def __init__(self, parent: ParentSocket, agent: Agent) -> None:
        self._parent = parent
        self._agent = agent
        self._runs: dict[int, _RunThread] = {}

    def serve(self) -> None:
        self.write(as_line(["ready"]))
        while (message := self._parent.read()) is not None:
            number, kind, *fields = message
            if kind == "run":
                self._begin(number, *fields)
                continue
            run = self._runs.get(number)
            if kind == "cancel":
                self.write(as_line([number, "cancelling"]))
            if run is not None:
                run.take(kind, fields)

    def write(self, line: bytes) -> None:
        self._parent.write(line)

    def forget(self, number: int) -> None:
        self._runs.pop(number, None)

    def _begin(self, number: int, row: Any, *chat_arguments: Any) -> None:
        try:
            run = _RunThread(self, number, self._agent, row, *chat_arguments)
            self._runs[number] = run
            run.start()
        except OSError as error:
            self._fail_start(number, f"could not be started ({describe_error(error)})")
        except (MemoryError, RuntimeError):  # RuntimeError: there is no room for a thread
            self._fail_start(number, OUT_OF_MEMORY)

    def _fail_start(self, number: int, words: str) -> None:
        self.forget(number)
        self.write(as_line([number, "error", words, True]))


class _RunThread:
    """One run of the agent, in a thread and an event loop of its own."""

    def __init__(
        self,
        host: _AgentHost,
        number: int,
        agent: Agent,
        row: Columns,
        prompt: Sequence[Message],
        seed: int,
        access: Sequence[str] | None,
    ) -> None:
        """row and what follows: as the parent writes them."""
        self._chat = Chat(self._send, prompt, seed, Access(*access) if access else None)
        self._host = host
        self._number = number
        self._agent = agent
        self._row = row
        self._lock = threading.Lock()
        self._is_ended = False
        self._loop = asyncio.new_event_loop()
        self._executor_name = f"run-{number}-executor"
        self._executor = ThreadPoolExecutor(thread_name_prefix=self._executor_name)
        self._loop.set_default_executor(self._executor)
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name=f"run-{self._number}", daemon=True).start()
        except BaseException:
            self._loop.close()
            raise

    def take(self, kind: str, fields: Sequence[Any]) -> None:
        """A message of the parent, in the main thread."""
        match kind:
            case "cancel":
                self._chat.end("the time of the episode is over")
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._cancel)
            case "answer":
                self._chat.settle(fields[0], fields[1])
            case "refused":
                self._chat.settle(fields[0], ValueError(fields[1]))
            case "over":
                self._chat.settle(fields[0], EpisodeOver(fields[1]))

    def _send(self, kind: str, request: int, payload: bytes) -> None:
        """Write a message about a request, unless the run has ended."""
        self._write(b'[%d, "%s", %d, %s]\n' % (self._number, kind.encode(), request, payload))

    def _run(self) -> None:
        """The whole thread."""
        asyncio.set_event_loop(self._loop)
        try:
            message = self._message()
        # a user's function raises any exception, and must not end this process
        except BaseException as error:
            message = ["end", None] if _is_over(error) else ["error", _words(error)]
        self._chat.end("the episode has ended")
        try:
            is_left = self._leaves_work()
        except BaseException:  # of a task that the agent left behind
            is_left = True
        self._host.forget(self._number)
        is_spoiled = is_left or message[1] == OUT_OF_MEMORY
        self._write(as_line([self._number, *message, is_spoiled]), is_last=True)
        self._loop.close()

    def _message(self) -> list[Any]:
        """What the agent returns, as the parent reads it."""
        self._task = self._loop.create_task(self._agent(self._chat, self._row))
        result = self._loop.run_until_complete(self._task)
        if result is None:
            return ["end", None]
        reward_result = reward_result_of(result)
        if isinstance(reward_result, Failure):
            return ["error", reward_result.words]
        return ["end", astuple(reward_result)]

    def _cancel(self) -> None:
        if self._task:
            self._task.cancel()

    def _leaves_work(self) -> bool:
        """Whether tasks or threads that the agent has started go on after they were told to end."""
        pending: set[asyncio.Task[Any]] = set()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            pending = self._loop.run_until_complete(asyncio.wait(tasks, timeout=_LEAVE_S))[1]
        self._loop.run_until_complete(asyncio.wait_for(self._loop.shutdown_asyncgens(), _LEAVE_S))
        self._executor.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + _LEAVE_S
        threads = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith(self._executor_name)
        ]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return bool(pending) or any(thread.is_alive() for thread in threads)

    def _write(self, line: bytes, *, is_last: bool = False) -> None:
        with self._lock:
            if not self._is_ended:
                self._is_ended = is_last
                self._host.write(line)


def _is_over(error: BaseException) -> bool:
    """Whether the agent ended because the episode was over, in itself or in its task groups."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(EpisodeOver)[1] is None
    return isinstance(error, EpisodeOver)


def _words(error: BaseException) -> str:
    """What an agent did that has raised an exception."""
    if isinstance(error, MemoryError):
        free_spare_memory()
        return OUT_OF_MEMORY
    return f"raised {describe_error(error)}"
