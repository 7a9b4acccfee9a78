"""Nobody waits for ever for a thread that has ended."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from megarl.isolation.loop_thread import LoopThread


def test_what_is_submitted_at_the_end_is_cancelled() -> None:
    thread = LoopThread("ends")
    before = thread.submit(asyncio.Event().wait())
    late: list[Future[Any]] = []

    async def last() -> None:
        late.append(thread.submit(asyncio.Event().wait()))

    thread.end(last())
    assert before.cancelled() and late[0].cancelled()
    thread.end(last())
