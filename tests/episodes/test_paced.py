from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from megarl.episodes.paced import PacedSampler
from megarl.types import Sample
from megarl.types.sampling import Sampling
from tests.samples.responses import response

SAMPLE = response((1,), np.zeros(1, np.int64))
BURST = 50


class AtOnce:
    """Begins every conversation, and ends every turn, in the iteration of the loop in which `ends` is set."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        await self.ends.wait()

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        await self.ends.wait()
        return SAMPLE

    async def complete(
        self, conversation: str, prompt_tokens: int, response_tokens: int
    ) -> None: ...

    def text(self, ids: Sequence[int]) -> str:
        return ""


def test_calls_that_end_in_one_instant_return_in_different_iterations() -> None:
    async def iterations(paced: bool, ended: list[int]) -> None:
        engine, passed = AtOnce(), 0
        sampler = PacedSampler(engine) if paced else engine

        async def count() -> None:
            nonlocal passed
            while True:
                passed += 1
                await asyncio.sleep(0)

        async def play(place: int) -> None:
            if place % 2:
                await sampler.begin(f"episode-{place}", 1)
            else:
                assert (
                    await sampler.turn(f"episode-{place}", 0, [1], Sampling(1, 1), place, 0)
                    is SAMPLE
                )
            ended.append(passed)

        counter = asyncio.ensure_future(count())
        played = [asyncio.ensure_future(play(place)) for place in range(BURST)]
        await asyncio.sleep(0)
        engine.ends.set()
        await asyncio.gather(*played)
        counter.cancel()

    together, apart = list[int](), list[int]()
    asyncio.run(iterations(False, together))
    asyncio.run(iterations(True, apart))
    assert len(set(together)) == 1, "what the test makes is a burst"
    assert len(set(apart)) == BURST


def test_a_cancelled_call_keeps_nobody_waiting() -> None:
    async def cancelled() -> None:
        engine = AtOnce()
        sampler = PacedSampler(engine)
        played = [asyncio.ensure_future(sampler.begin(f"episode-{place}", 1)) for place in range(4)]
        await asyncio.sleep(0)
        engine.ends.set()
        await asyncio.sleep(0)
        played[0].cancel()
        played[2].cancel()
        found = await asyncio.gather(*played, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found] == [
            True,
            False,
            True,
            False,
        ]

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_a_sampler_serves_one_loop_after_another() -> None:
    async def burst(sampler: PacedSampler, engine: AtOnce) -> None:
        engine.ends = asyncio.Event()
        engine.ends.set()
        await asyncio.gather(*(sampler.begin(f"episode-{place}", 1) for place in range(3)))

    engine = AtOnce()
    sampler = PacedSampler(engine)
    for _ in range(2):
        asyncio.run(burst(sampler, engine))
