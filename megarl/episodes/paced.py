"""Turns that the engine ends in one instant are handled one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")
_next: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def paced(call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call of the engine; such calls return in different iterations of the event loop.

    An episode's task works when its call returns. The tasks of many turns that end together would otherwise all work in
    one iteration, and deadlines and requests of agents would wait for the last of them.
    """
    result = await call
    async with _next.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
    return result
