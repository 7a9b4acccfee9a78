"""Turns that the engine ends in one instant are handled one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from megarl.episodes.rows import TurnSampler
from megarl.types import Sample
from megarl.types.sampling import Sampling


class PacedSampler:
    """The calls of `sampler` return in different iterations of the event loop.

    An episode's task works when its call returns. The tasks of many turns that end together would otherwise all work in
    one iteration, and deadlines and requests of agents would wait for the last of them.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler = sampler
        self._next: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        await self._sampler.begin(conversation, prompt_tokens)
        await self._wait()

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        sample = await self._sampler.turn(conversation, number, context_ids, sampling, place, rows)
        await self._wait()
        return sample

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        await self._sampler.complete(conversation, prompt_tokens, response_tokens)

    def text(self, ids: Sequence[int]) -> str:
        return self._sampler.text(ids)

    async def _wait(self) -> None:
        async with self._next.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
