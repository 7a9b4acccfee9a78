"""A process that keeps copies of training ranks' states in its node's memory, where they outlive the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import numpy as np
import psutil

from megarl.cluster.actor import Peer
from megarl.types import ByteArray

# bytes that move at once, and how many such parts of a state: what the object store holds of it
CHUNK_BYTES = 64 << 20
_IN_FLIGHT = 2
# asks for the bytes from a position to before another
_Ask = Callable[[int, int], Awaitable[ByteArray]]


@dataclass(frozen=True)
class CopyName:
    """Of which rank ("critic rank 3") a copy is, and of which generation: after which step it was taken."""

    rank: str
    generation: int


@dataclass(frozen=True)
class CopyCost:
    """The bytes of a copy, and how long it took its keeper."""

    num_bytes: int
    seconds: float


@dataclass
class _KeptCopy:
    """The state of a rank as bytes, and its small parts. is_whole: all of it has come."""

    content: ByteArray
    small: bytes
    is_whole: bool = False


class StateKeeper:
    """Copies of ranks' states. Each comes from the rank or from another keeper, and goes to a rank, in parts.

    Another keeper calls the same methods as this one calls of a rank, with the copy's name.
    """

    def __init__(self) -> None:
        self._copies: dict[CopyName, _KeptCopy] = {}

    async def take(self, name: CopyName, rank: Peer) -> CopyCost:
        """Copy the state of a rank, which must not compute meanwhile.

        Raises MemoryError where this node has no room, and what the rank raises.
        """
        began_s = time.monotonic()
        num_bytes, small = await rank.call("begin_copy")
        copy = self._new(name, num_bytes, small)
        await self._fill(copy, lambda start, end: rank.call("copied_bytes", start, end))
        await rank.call("end_copy")
        return CopyCost(num_bytes, time.monotonic() - began_s)

    async def take_second(self, name: CopyName, keeper: Peer, first: CopyCost) -> CopyCost:
        """Copy a state from another keeper, which has all of it. first: what that has cost. Raises as `take`."""
        began_s = time.monotonic()
        small = await keeper.call("small", name)
        copy = self._new(name, first.num_bytes, small)
        await self._fill(copy, lambda start, end: keeper.call("part", name, start, end))
        return CopyCost(first.num_bytes, time.monotonic() - began_s)

    def _new(self, name: CopyName, num_bytes: int, small: bytes) -> _KeptCopy:
        available = psutil.virtual_memory().available
        if num_bytes > available:
            raise MemoryError(f"{num_bytes} bytes, of which the node has {available}")
        copy = _KeptCopy(np.empty(num_bytes, np.uint8), small)
        self._copies[name] = copy
        return copy

    async def _fill(self, copy: _KeptCopy, ask: _Ask) -> None:
        """Get all bytes, a few parts at a time."""
        slots = asyncio.Semaphore(_IN_FLIGHT)
        num_bytes = len(copy.content)

        async def fetch(start: int) -> None:
            async with slots:
                end = min(start + CHUNK_BYTES, num_bytes)
                copy.content[start:end] = await ask(start, end)

        await asyncio.gather(*map(fetch, range(0, num_bytes, CHUNK_BYTES)))
        copy.is_whole = True

    async def small(self, name: CopyName) -> bytes:
        return self._whole(name).small

    async def part(self, name: CopyName, start: int, end: int) -> ByteArray:
        return self._whole(name).content[start:end]

    async def give(self, name: CopyName, rank: Peer) -> None:
        """Give a copy to the rank that is in the place of the one that it came from. Raises what the rank raises."""
        copy = self._whole(name)
        num_bytes = len(copy.content)
        await rank.call("begin_restore", num_bytes)
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def send(start: int) -> None:
            async with slots:
                content = copy.content[start : start + CHUNK_BYTES]
                await rank.call("restore_bytes", start, content)

        await asyncio.gather(*map(send, range(0, num_bytes, CHUNK_BYTES)))
        await rank.call("finish_restore", copy.small)

    async def keep_only(self, generations: Collection[int]) -> None:
        """Free the copies of all other generations."""
        self._copies = {
            name: copy for name, copy in self._copies.items() if name.generation in generations
        }

    def _whole(self, name: CopyName) -> _KeptCopy:
        copy = self._copies.get(name)
        if copy is None or not copy.is_whole:
            raise RuntimeError(f"no whole copy of {name.rank} after step {name.generation} is here")
        return copy
