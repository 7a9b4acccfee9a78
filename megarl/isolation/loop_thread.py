"""A thread with an event loop of its own, in which worker processes are started and their messages read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import wraps
from typing import Any, TypeVar, cast

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


class LoopThread:
    """The thread lets callers await results in any loop, or wait for them without one.

    The kernel ends a worker process with the thread that started it.
    """

    def __init__(self, name: str) -> None:
        # not the policy's own: SGLang's knows no subprocesses
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work that is done in the thread, awaited in the caller's loop."""
        return await asyncio.wrap_future(self.submit(work))

    def make(self, build: Callable[[], Result]) -> Result:
        """What a callable builds that belongs to the thread's loop."""
        return self.submit(_built(build)).result()

    def end(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the last work, cancel all other, and end the thread; nothing where it has ended already."""
        if not self._thread.is_alive():
            work.close()
            return
        self.submit(_last(work)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_forever()
        if left := asyncio.all_tasks(self._loop):  # also what was submitted after the last work
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))


def in_own_thread(method: Method) -> Method:
    """Let a coroutine method run in its object's `thread`, whichever loop awaits it."""

    @wraps(method)
    async def run(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        return await owner.thread.run(method(owner, *arguments, **keywords))

    return cast(Method, run)


async def _built(build: Callable[[], Result]) -> Result:
    return build()


async def _last(work: Coroutine[Any, Any, None]) -> None:
    await work
    await asyncio.get_running_loop().shutdown_default_executor()
