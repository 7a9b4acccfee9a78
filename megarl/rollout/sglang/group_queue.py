"""The queue of an engine's requests in front of its attention groups, and the samples that it has finished.

A request is a sample, or, named CONVERSATION/NUMBER, a turn of one: a conversation has a place in one group, whose
cache has what was said before, from its own `place` until `complete`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from megarl.rollout.load_balancing import Capacity, CompletedSample, RequestBalancer


class GroupQueue:
    """Gives each request its attention group, in the order of arrival, as soon as one has room.

    SGLang's groups admit requests by themselves and cannot pass them on: with DP attention they admit more long ones
    than fit, and retract them. All methods run in the event loop of the engine.
    """

    def __init__(self, capacity: Capacity, groups: int, longest_response: int) -> None:
        """capacity: of each group."""
        self._balancer = RequestBalancer([capacity] * groups, longest_response)
        # with the tokens of the prompt
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        self._placed: dict[str, tuple[int, int]] = {}  # group and tokens of the prompt, by request
        self._completed: list[CompletedSample] = []
        self._has_finished = asyncio.Event()

    async def place(self, request: str, prompt_tokens: int) -> None:
        """Wait until a group has room for the request; a turn has that of its conversation."""
        request = _sample_of(request)
        if request in self._placed:
            return
        placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((placed, prompt_tokens))
        self._assign()
        try:
            self._placed[request] = await placed, prompt_tokens
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled():
                self._balancer.withdraw(placed.result(), prompt_tokens)
                self._assign()
            raise

    @property
    def num_placed(self) -> int:
        """Requests and conversations that groups have."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Those that no group has room for."""
        return len(self._waiting)

    def group_of(self, request: str) -> int:
        """The group of a request that was placed."""
        return self._placed[_sample_of(request)][0]

    def withdraw(self, request: str) -> None:
        """The request was not sent, or was aborted before it ran."""
        if request in self._placed:
            self._balancer.withdraw(*self._placed.pop(request))
            self._assign()

    def finish(self, request: str, response_tokens: int) -> None:
        """The request has finished, as a response or by an abort; a conversation goes on."""
        if request in self._placed:
            group, prompt_tokens = self._placed.pop(request)
            self._balancer.finish(group, prompt_tokens, response_tokens)
            self._report(CompletedSample(group, prompt_tokens, response_tokens))
            self._assign()

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        """The conversation has ended, with so many tokens after its prompt; perhaps without any turn.

        prompt_tokens: as its sample was assigned to the engine.
        """
        group, placed_tokens = self._placed.pop(conversation, (0, None))
        if placed_tokens is not None:
            self._balancer.finish(group, placed_tokens, response_tokens)
        self._report(CompletedSample(group, prompt_tokens, response_tokens))
        self._assign()

    async def take_completed(self) -> list[CompletedSample]:
        """What has finished since the last call, as soon as anything has."""
        await self._has_finished.wait()
        self._has_finished.clear()
        completed = self._completed
        self._completed = []
        return completed

    def _report(self, sample: CompletedSample) -> None:
        self._completed.append(sample)
        self._has_finished.set()

    def _assign(self) -> None:
        while self._waiting:
            placed, prompt_tokens = self._waiting[0]
            if not placed.cancelled():
                group = self._balancer.assign(prompt_tokens)
                if group is None:
                    return
                placed.set_result(group)
            self._waiting.popleft()


def _sample_of(request: str) -> str:
    """The conversation of a turn, or the request itself."""
    return request.partition("/")[0]
