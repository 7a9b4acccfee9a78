"""The process that runs tools and environments, started by `workers` through `megarl.isolation.entry`.

It reads and writes JSON lines on the socket that is its standard input and output. Input: first an object, the fields
of `EnvironmentSettings`; then jobs, `[number, operation, ...]`:

    [number, "call", instance, name, arguments]   instance: 0 for a tool that is a function
    [number, "open", instance, row, seed]
    [number, "reply", instance, text]
    [number, "reward", instance]
    [number, "close", instance]

Output: first `["ready", schemas, names of `async def` functions, reserved methods, replayable]`, or the error
`[where, problem, mend]`; then for each job one of

    [number, "text", text, reward, done]
    [number, "none"]
    [number, "reward_result", reward, correct, answer]
    [number, "error", kind, words, is_last]       is_last: the process can do no other job

and at any time `["service", name, event, words]`: what a call of a service has met.

The main thread runs plain functions, one at a time as the parent sends them; another thread's event loop reads the
socket and runs `async def` functions together, so that a plain function that hangs does not hold them up.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import traceback
from dataclasses import astuple
from typing import Any

from megarl.environments.runtime.environment import Environment
from megarl.environments.runtime.results import BadResult, cut, observation_of
from megarl.environments.runtime.tool_loading import Toolbox, load_environment, load_tools
from megarl.environments.runtime.tools import BadArguments
from megarl.isolation.child import (
    LINE_BYTES,
    OUT_OF_MEMORY,
    SOCKET_CLOSED,
    ParentSocket,
    as_line,
    free_spare_memory,
    limit_memory,
    share_heap,
    tell_service_events_in_order,
    too_long,
)
from megarl.isolation.service import limit_job
from megarl.printable import describe_error
from megarl.types.json_objects import JsonObject
from megarl.types.reward_result import Failure, reward_result_of

JobMessage = list[Any]


def main(parent: ParentSocket, spec: JsonObject) -> None:
    """Do jobs until the parent closes the socket or ends."""
    share_heap()
    if spec["environment"] is None:
        toolbox = load_tools(spec["tools"], spec["arguments"], prepares=spec["prepares"])
    else:
        toolbox = load_environment(
            spec["environment"], spec["arguments"], prepares=spec["prepares"]
        )
    host = EnvironmentHost(parent, toolbox, spec)
    host.start()
    limit_memory(spec["memory_mb"])
    host.run(_ready(toolbox))


def _ready(toolbox: Toolbox) -> list[Any]:
    names = [tool.name for tool in toolbox.tools.values() if tool.is_async]
    replayable = toolbox.environment is None or bool(toolbox.environment.replayable)
    schemas = [tool.schema for tool in toolbox.tools.values()]
    return ["ready", schemas, [*names, *sorted(toolbox.is_async)], sorted(toolbox.has), replayable]


class EnvironmentHost:
    """The instances of a process, and the two threads that run their functions."""

    def __init__(self, parent: ParentSocket, toolbox: Toolbox, spec: JsonObject) -> None:
        self._parent = parent
        self._toolbox = toolbox
        self._timeout_s = spec["call_timeout_s"]
        self._result_bytes = spec["result_bytes"]
        self._instances: dict[int, Environment] = {}
        self._plain: queue.SimpleQueue[JobMessage] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._is_connected = threading.Event()

    def start(self) -> None:
        """Start the event loop, whose stack is not part of the memory that is limited."""
        threading.Thread(target=self._run_loop, name="loop", daemon=True).start()
        self._is_connected.wait()

    def run(self, ready: list[Any]) -> None:
        """Say that jobs may come, and do them until the process is ended; the event loop ends it with the socket."""
        self._loop.call_soon_threadsafe(self._write, ready)
        while True:
            job = self._plain.get()
            limit_job(self._timeout_s)
            try:
                answer = self._answer(job, self._perform(job))
            except (
                BaseException
            ) as error:  # a user's function raises any exception, and must not end this process
                answer = _error(job, error)
            self._loop.call_soon_threadsafe(self._write, answer)

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._read())
        except OSError:
            os._exit(SOCKET_CLOSED)
        except BaseException:  # of a task that a user's function made
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection(
            sock=self._parent.socket, limit=LINE_BYTES
        )
        tell_service_events_in_order(self._write)
        self._is_connected.set()
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            job = json.loads(line)
            if self._is_async(job):
                task = asyncio.create_task(self._await(job))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                self._plain.put(job)

    def _is_async(self, job: JobMessage) -> bool:
        operation = job[1]
        if operation == "call":
            return self._toolbox.tools[job[3]].is_async
        return ("reset" if operation == "open" else operation) in self._toolbox.is_async

    async def _await(self, job: JobMessage) -> None:
        limit_job(self._timeout_s)
        bound = asyncio.timeout(self._timeout_s)
        try:
            async with bound:
                result = await self._perform(job)
            answer = self._answer(job, result)
        except BaseException as error:
            if isinstance(error, TimeoutError) and bound.expired():
                answer = [job[0], "error", "timeout", too_long(self._timeout_s), False]
            else:
                answer = _error(job, error)
        self._write(answer)

    def _perform(self, job: JobMessage) -> Any:
        """The return value of a job's function: of one that is `async def`, its coroutine."""
        _, operation, instance, *fields = job
        match operation:
            case "call":
                tool = self._toolbox.tools[fields[0]]
                values = tool.values(fields[1])
                if self._toolbox.environment is None:
                    return tool.function(**values)
                return getattr(self._instances[instance], tool.name)(**values)
            case "open":
                row, seed = fields
                self._instances[instance] = self._toolbox.make(seed)
                return self._instances[instance].reset(row)
            case "close":
                return self._instances.pop(instance).close()
        return getattr(self._instances[instance], operation)(*fields)

    def _answer(self, job: JobMessage, result: Any) -> list[Any]:
        """The message about a job whose function has returned. Raises BadResult."""
        number, operation = job[:2]
        if operation == "close" or (result is None and operation != "call"):
            return [number, "none"]
        if operation == "reward":
            reward_result = reward_result_of(result)
            if isinstance(reward_result, Failure):
                raise BadResult(reward_result.words)
            return [number, "reward_result", *astuple(reward_result)]
        if operation == "open":
            if not isinstance(result, str):
                raise BadResult(
                    f"returned a value of type {type(result).__name__}, which is neither text nor None"
                )
            return [number, "text", cut(result, self._result_bytes), 0.0, False]
        seen = observation_of(result, self._result_bytes)
        return [number, "text", seen.text, seen.reward, seen.done]

    def _write(self, answer: list[Any]) -> None:
        assert self._writer
        self._writer.write(as_line(answer))


def _error(job: JobMessage, error: BaseException) -> list[Any]:
    """The message about a job whose function raised an exception."""
    number = job[0]
    if isinstance(error, MemoryError):
        free_spare_memory()
        return [number, "error", "memory", OUT_OF_MEMORY, True]
    if isinstance(error, BadArguments | BadResult):
        return [number, "error", error.kind, str(error), False]
    return [number, "error", "raised", describe_error(error), False]
