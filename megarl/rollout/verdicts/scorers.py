"""Who judges which row: a recipe's reward functions, each with worker processes of its own, behind one door."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from megarl.config import RewardConfig
from megarl.rollout.rewards import WHERE, Failure, Verdict
from megarl.rollout.verdicts.pool import Pool
from megarl.rollout.verdicts.process import Order

Result = TypeVar("Result")
DEFAULT = ""  # of the rows whose source has no function of its own


def orders(reward: RewardConfig, start_s: float) -> dict[str, Order]:
    """By source, what its rows are judged with; start_s: in which a function has to be imported."""
    named = {
        name: (f"reward.by_source.{name}.function", one.function, one.arguments)
        for name, one in reward.by_source.items()
    }
    if reward.function:
        named[DEFAULT] = (WHERE, reward.function, reward.arguments)
    bounds = reward.timeout_s, reward.memory_mb, start_s
    return {source: Order(where, function, given, *bounds) for source, (where, function, given) in named.items()}


def source_of(reward: RewardConfig, row: Mapping[str, Any]) -> str:
    """The source that judges a row: its own if it has a function."""
    name = str(row.get(reward.source, ""))
    return name if name in reward.by_source else DEFAULT


class Scorers:
    """The workers of all functions, and the thread whose loop reads their answers.

    A thread, so that verdicts can be awaited in any loop, and waited for where none runs; and because the kernel ends a
    worker with the thread that started it. Building it waits until every function is imported; UserFault if one cannot.
    """

    def __init__(self, reward: RewardConfig, start_s: float) -> None:
        self._reward = reward
        self._loop = asyncio.SelectorEventLoop()  # not the policy's own: SGLang's knows no subprocesses
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()
        self._pools: dict[str, Pool] = {}
        try:
            self._wait(self._start(orders(reward, start_s)))
        except BaseException:
            self.shutdown()
            raise

    async def verdicts(self, answer: str, row: Mapping[str, Any], responses: Sequence[str]) -> list[Verdict | Failure]:
        """One for each response, in order. Raises UserFault when the function cannot be had any more."""
        pool = self._pools[source_of(self._reward, row)]
        return await asyncio.wrap_future(self._submit(pool.verdicts(answer, row, responses)))

    def wait_for_verdicts(
        self, answer: str, row: Mapping[str, Any], responses: Sequence[str]
    ) -> list[Verdict | Failure]:
        """The same where no loop runs."""
        return self._wait(self._pools[source_of(self._reward, row)].verdicts(answer, row, responses))

    @property
    def slowest_s(self) -> float:
        """What the slowest verdict so far took."""
        return max(pool.slowest_s for pool in self._pools.values())

    def pids(self) -> list[int]:
        """The worker processes."""
        return [pid for pool in self._pools.values() for pid in pool.pids()]

    def shutdown(self) -> None:
        """End and reap the workers; harmless when repeated."""
        if not self._thread.is_alive():
            return
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, given: Mapping[str, Order]) -> None:
        for source, order in given.items():
            self._pools[source] = Pool(order, self._reward.workers)
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))

    async def _end(self) -> None:
        for pool in self._pools.values():
            await pool.end()
        await asyncio.get_running_loop().shutdown_default_executor()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._submit(work).result()
