"""The calls that a worker has open, and the one that it has finished last."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from megarl.types.conditions import TimedCall, WorkerCondition, WorkLoad

_LOAD_S = 1.5  # for the target's own answer, which another thread of it may hold up


class CallLog:
    """Of one worker; everything happens on its event loop."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, tuple[str, float]] = {}  # method and when it began
        self._last: tuple[str, float] | None = None  # method and when it ended

    @contextmanager
    def open(self, method: str) -> Iterator[None]:
        """A call that lasts as long as the block."""
        number = next(self._numbers)
        self._open[number] = method, time.monotonic()
        try:
            yield
        finally:
            del self._open[number]
            self._last = method, time.monotonic()

    async def condition(self, target: Any) -> WorkerCondition:
        """The calls, and what the target has in hand, where it says so by a method `work_load`."""
        now_s = time.monotonic()
        open_calls = [TimedCall(method, now_s - began_s) for method, began_s in self._open.values()]
        open_calls.sort(key=lambda call: -call.seconds)
        last = self._last and TimedCall(self._last[0], now_s - self._last[1])
        load = WorkLoad()
        if hasattr(target, "work_load"):
            # without it the calls are known all the same
            with suppress(Exception):
                load = await asyncio.wait_for(target.work_load(), _LOAD_S)
        return WorkerCondition(os.getpid(), tuple(open_calls), last, load)
