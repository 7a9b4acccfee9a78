"""Calls of the engine that end in one instant return in different iterations of the loop."""

from __future__ import annotations

import asyncio

from megarl.episodes.paced import paced

BURST = 50


async def at_once(ends: asyncio.Event) -> None:
    """Ends in the iteration of the loop in which the event is set."""
    await ends.wait()


def test_calls_that_end_in_one_instant_return_in_different_iterations() -> None:
    """In one loop after another."""

    async def iterations(is_paced: bool) -> set[int]:
        ends = asyncio.Event()
        passed = 0

        async def count() -> None:
            nonlocal passed
            while True:
                passed += 1
                await asyncio.sleep(0)

        async def play() -> int:
            await (paced(at_once(ends)) if is_paced else at_once(ends))
            return passed

        counter = asyncio.ensure_future(count())
        played = [asyncio.ensure_future(play()) for _ in range(BURST)]
        await asyncio.sleep(0)
        ends.set()
        ended = await asyncio.gather(*played)
        counter.cancel()
        return set(ended)

    assert len(asyncio.run(iterations(False))) == 1, "what the test makes is a burst"
    for _ in range(2):
        assert len(asyncio.run(iterations(True))) == BURST


def test_a_cancelled_call_keeps_nobody_waiting() -> None:
    async def cancelled() -> None:
        ends = asyncio.Event()
        played = [asyncio.ensure_future(paced(at_once(ends))) for _ in range(4)]
        await asyncio.sleep(0)
        ends.set()
        await asyncio.sleep(0)
        played[0].cancel()
        played[2].cancel()
        results = await asyncio.gather(*played, return_exceptions=True)
        assert [result is None for result in results] == [False, True, False, True]

    asyncio.run(asyncio.wait_for(cancelled(), 60))
