"""A sampler whose turns end one after another, however many the engine ends in one instant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.rollout.conversations.rows import TurnSampler
from megarl.rollout.sglang.arguments import Sampling
from megarl.types import Sample


class PacedSampler:
    """`sampler`, whose calls return in different iterations of the event loop.

    Each task does its work for a turn when a call returns. Without this the tasks of a burst would do theirs in one
    iteration, and nothing else would run until the last of them.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler, self._next = sampler, asyncio.Lock()

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        await self._sampler.begin(conversation, prompt_tokens)
        await self._wait()

    async def turn(
        self, conversation: str, number: int, context_ids: Sequence[int], sampling: Sampling, place: int, rows: int
    ) -> Sample:
        sample = await self._sampler.turn(conversation, number, context_ids, sampling, place, rows)
        await self._wait()
        return sample

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        await self._sampler.complete(conversation, prompt_tokens, response_tokens)

    def text(self, ids: Sequence[int]) -> str:
        return self._sampler.text(ids)

    async def _wait(self) -> None:
        async with self._next:
            await asyncio.sleep(0)
