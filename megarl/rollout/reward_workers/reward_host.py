"""The process that computes verdicts, started by `pool` through `megarl.isolation.entry`.

It reads and writes JSON lines on the socket that is its standard input and output. Input: first an object, the fields
of a `RewardSpec`; then `[answer, row]`, which holds for all responses that follow, and `[number, response]` for each
response, or `[number, response, episode]` for a function that takes episodes. Output: first `[is_async,
takes_episode]`, or the fault `[where, problem, mend]`; then for each response `[number, reward, correct, answer]`, or
`[number, words, is_last]` where there is no verdict. is_last: the process can compute no other verdict. At any time
`["service", name, event, words]`: what a call of a service has met.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from typing import Any

from megarl.isolation.child import (
    LINE_BYTES,
    OUT_OF_MEMORY,
    ParentSocket,
    as_line,
    free_spare_memory,
    limit_memory,
    tell_service_events,
    tell_service_events_in_order,
    too_long,
)
from megarl.isolation.function_loading import is_coroutine_function
from megarl.isolation.service import limit_job
from megarl.printable import describe_error
from megarl.rollout.rewards import EPISODE, Reward, load_reward, takes_episode
from megarl.types.json_objects import Columns, JsonObject
from megarl.types.reward_result import Failure, RewardResult, reward_result_of

_OUT_OF_MEMORY = Failure(OUT_OF_MEMORY)


def main(parent: ParentSocket, spec: JsonObject) -> None:
    """Score responses until the parent closes the socket or ends."""
    tell_service_events(lambda message: parent.write(as_line(message)))
    reward = load_reward(spec["function"], spec["arguments"], spec["where"])
    is_async = is_coroutine_function(reward)
    limit_memory(spec["memory_mb"])
    parent.write(as_line([is_async, takes_episode(reward)]))
    if is_async:
        asyncio.run(_score_together(parent, reward, spec["timeout_s"]))
    else:
        _score_in_turn(parent, reward, spec["timeout_s"])


def _keywords(episode: Sequence[Any]) -> JsonObject:
    """Of a function, from the rest of a response's message."""
    return {EPISODE: episode[0]} if episode else {}


def _score_in_turn(parent: ParentSocket, reward: Reward, timeout_s: float) -> None:
    answer = ""
    row = {}
    while (message := parent.read()) is not None:
        if isinstance(message[0], str):
            answer, row = message
            continue
        number, response, *episode = message
        limit_job(timeout_s)
        try:
            result = reward_result_of(reward(response, answer, row, **_keywords(episode)))
        except (
            BaseException
        ) as error:  # a user's function raises any exception, and must not end this process
            result = _failure(error)
        _reply(parent.write, number, result)


async def _score_together(parent: ParentSocket, reward: Reward, timeout_s: float) -> None:
    """Score every response as it comes: the parent decides how many are in flight."""
    reader, writer = await asyncio.open_connection(sock=parent.socket, limit=LINE_BYTES)
    tell_service_events_in_order(lambda message: writer.write(as_line(message)))
    tasks: set[asyncio.Task[None]] = set()

    async def score(message: Sequence[Any], answer: str, row: Columns) -> None:
        number, response, *episode = message
        limit_job(timeout_s)
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                result = reward_result_of(await reward(response, answer, row, **_keywords(episode)))
        except BaseException as error:
            result = _failure(error)
            if isinstance(error, TimeoutError) and bound.expired():
                result = Failure(too_long(timeout_s))
        _reply(writer.write, number, result)

    answer = ""
    row = {}
    while line := await reader.readline():
        message = json.loads(line)
        if isinstance(message[0], str):
            answer, row = message
            continue
        task = asyncio.create_task(score(message, answer, row))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _failure(error: BaseException) -> Failure:
    """The failure of a function that raised an exception."""
    if isinstance(error, MemoryError):
        free_spare_memory()
        return _OUT_OF_MEMORY
    return Failure(f"raised {describe_error(error)}")


def _reply(write: Callable[[bytes], object], number: int, result: RewardResult | Failure) -> None:
    """Write a response's result; does not return when the memory is full."""
    if isinstance(result, RewardResult):
        write(as_line([number, result.reward, result.correct, result.answer]))
    else:
        write(as_line([number, result.words, result is _OUT_OF_MEMORY]))
    while result is _OUT_OF_MEMORY:
        # its memory is too fragmented to go on; the parent kills it when it has read the reply
        signal.pause()
