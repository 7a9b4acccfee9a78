"""The queue in front of an engine's attention groups, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.sglang.group_queue import GroupQueue


async def settled(*works: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """The tasks once each has gone as far as it can."""
    tasks = [asyncio.ensure_future(work) for work in works]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def full() -> tuple[GroupQueue, list[asyncio.Task[Any]]]:
    """Two groups with room for two sequences each, and six requests."""
    queue = GroupQueue(Capacity(2, 10**6), 2, 100)
    return queue, await settled(*(queue.place(f"r{number}", 5) for number in range(6)))


def test_requests_wait_until_a_group_has_capacity() -> None:
    async def play() -> None:
        queue, tasks = await full()
        assert [task.done() for task in tasks] == [True] * 4 + [False] * 2
        assert [queue.group_of(f"r{number}") for number in range(4)] == [0, 1, 0, 1]
        queue.finish("r1", 20)
        queue.finish("r3", 30)
        await settled()
        assert [queue.group_of("r4"), queue.group_of("r5")] == [1, 1], (
            "to the group that has finished most"
        )
        assert await queue.take_completed() == [
            CompletedSample(1, 5, 20),
            CompletedSample(1, 5, 30),
        ]
        (report,) = await settled(queue.take_completed())
        assert not report.done(), "nothing has finished since"
        queue.finish("r0", 7)
        assert await report == [CompletedSample(0, 5, 7)]

    asyncio.run(play())


@pytest.mark.parametrize("gone", ["r4", "r1"])
def test_what_is_cancelled_or_aborted_gives_its_place_to_the_next(gone: str) -> None:
    """r4 waits, r1 runs: either way r5 comes next."""

    async def play() -> None:
        queue, tasks = await full()
        if gone == "r4":
            tasks[4].cancel()
            await settled()
            queue.finish("r1", 9)
        else:
            queue.withdraw("r1")
            queue.withdraw("r1")
            await settled()
            queue.finish("r0", 9)
        await settled()
        assert tasks[5].done() and queue.group_of("r5") in {0, 1}
        assert len(await queue.take_completed()) == 1, "an aborted one has not finished"

    asyncio.run(play())


def test_a_request_that_is_cancelled_when_it_has_just_been_placed_leaves_its_place() -> None:
    async def play() -> None:
        queue, tasks = await full()
        queue.finish("r1", 9)  # the place is r4's, which has not woken up
        tasks[4].cancel()
        await settled()
        assert tasks[4].cancelled() and tasks[5].done() and queue.group_of("r5") == 1

    asyncio.run(play())
