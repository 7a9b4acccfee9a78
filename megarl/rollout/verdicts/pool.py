"""Verdicts from processes of their own: a reward that hangs, dies or eats memory costs its verdict and nothing else."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from megarl.rollout.rewards import Failure, Verdict
from megarl.rollout.verdicts.process import AT_ONCE, Item, Order, VerdictProcess, reply_of, start_of
from megarl.rollout.verdicts.worker import LINK_CLOSED, too_long
from megarl.types import UserFault

_BATCH = 16  # at most so many wait behind one that hangs
_BATCH_S = 0.01
_MOST_FAILED_STARTS = 3
_GARBAGE, _CLOSED = "wrote to its process's link", "closed its process's link"


class Pool:
    """The workers of one function. Everything happens in the loop that runs `start`."""

    def __init__(self, order: Order, num_workers: int) -> None:
        self._order, self._num_workers = order, num_workers
        self._loop = asyncio.get_running_loop()
        self._workers: list[VerdictProcess] = []
        self._waiting: deque[Item] = deque()
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fault: UserFault | None = None
        self._ready = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._failed_starts = 0  # one after the other
        self.slowest_s = 0.0  # of all verdicts so far

    async def start(self) -> None:
        """Raises UserFault when the function cannot be had."""
        await asyncio.gather(*(self._begin() for _ in range(self._num_workers)))
        await self._ready

    async def verdicts(self, answer: str, row: Mapping[str, Any], responses: Sequence[str]) -> list[Verdict | Failure]:
        """In the order of the responses. Raises UserFault when the function can no longer be had."""
        if self._fault:
            raise self._fault
        try:
            context = json.dumps([answer, row], default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            return [Failure(f"the row cannot be sent to its process ({error})") for _ in responses]
        items = [Item(next(self._numbers), context, one, self._loop.create_future()) for one in responses]
        self._waiting += items
        self._feed()
        return await asyncio.gather(*(item.found for item in items))

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    async def end(self) -> None:
        """Kill and reap every worker; who waits for a verdict is cancelled."""
        self._num_workers = 0
        for worker in list(self._workers):
            self._remove(worker)
        for item in self._waiting:
            item.found.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def heard(self, worker: VerdictProcess, message: list[Any] | None) -> None:
        """A line of a worker's; None, of another form or about a response that it has not: the function wrote it."""
        if not worker.is_ready:
            self._started(worker, message)
            return
        reply = reply_of(message)
        if reply is None or reply.number not in worker.in_flight:
            self._blame(worker, Failure(_GARBAGE))
            self._replace(worker)
            return
        item = worker.in_flight.pop(reply.number)
        now = self._loop.time()
        self.slowest_s = max(self.slowest_s, now - item.began)
        _settle(item, reply.found)
        if reply.is_last:
            self._replace(worker)
            return
        if not worker.is_async:
            for following in worker.in_flight.values():
                following.began = now
                break
            else:
                pace_s = (now - worker.batch_began) / worker.batch_size
                worker.batch = max(1, min(_BATCH, int(_BATCH_S / max(pace_s, 1e-6))))
        self._feed()

    def lost(self, worker: VerdictProcess) -> None:
        """The process has ended by itself, or was killed by others."""
        if not worker.is_gone:
            self._spawn(self._bury(worker))

    async def _begin(self) -> None:
        """One more worker; what its function costs to import is not yet anybody's time."""
        try:
            worker = VerdictProcess(self, self._order)
        except OSError as error:
            self._fail(UserFault("reward.workers", f"a process cannot be started ({error})", "give it more room"))
            return
        self._workers.append(worker)
        await self._loop.create_connection(lambda: worker, sock=worker.socket)
        self._loop.call_later(self._order.start_s, self._give_up_start, worker)

    def _started(self, worker: VerdictProcess, message: list[Any] | None) -> None:
        first = start_of(message)
        if first is None:
            problem = f"{self._order.function} {_GARBAGE} while it was imported"
            first = UserFault(self._order.where, problem, "leave files alone that it did not open")
        if isinstance(first, UserFault):
            self._fail(first)
            return
        worker.is_ready, worker.is_async = True, first
        self._failed_starts = 0
        if all(one.is_ready for one in self._workers) and not self._ready.done():
            self._ready.set_result(None)
        self._feed()

    def _give_up_start(self, worker: VerdictProcess) -> None:
        if worker in self._workers and not worker.is_ready:
            problem = f"{self._order.function} was not imported within {self._order.start_s:g} s"
            self._fail(UserFault(self._order.where, problem, "make its import faster, or raise run.timeout_s"))

    def _fail(self, fault: UserFault) -> None:
        """There is no function to judge with: whoever waits is told."""
        self._fault = self._fault or fault
        self._num_workers = 0
        for worker in list(self._workers):
            self._waiting += worker.in_flight.values()
            worker.in_flight = {}
            self._remove(worker)
        for item in self._waiting:
            if not item.found.done():
                item.found.set_exception(fault)
        self._waiting.clear()
        if not self._ready.done():
            self._ready.set_exception(fault)

    def _feed(self) -> None:
        """Give what waits to workers that have room, and watch the clock."""
        for worker in self._workers:
            self._fill(worker)
        self._watch()

    def _fill(self, worker: VerdictProcess) -> None:
        if not worker.has_room():
            return
        now, most = self._loop.time(), AT_ONCE - len(worker.in_flight) if worker.is_async else worker.batch
        taken = 0
        while self._waiting and taken < most:
            item = self._waiting[0]
            if item.alone and worker.in_flight:
                break
            self._waiting.popleft()
            if item.found.done():  # nobody waits any more
                continue
            item.began = now
            worker.send(item)
            taken += 1
            if item.alone:
                break
        worker.batch_began, worker.batch_size = now, max(taken, 1)

    def _watch(self) -> None:
        """One timer, at the first deadline of all."""
        if self._timer:
            self._timer.cancel()
        deadlines = [worker.deadline() for worker in self._workers]
        first = min((one for one in deadlines if one is not None), default=None)
        self._timer = self._loop.call_at(first, self._expire) if first is not None else None

    def _expire(self) -> None:
        """End the workers whose time is up. Of several responses in flight the one that hangs is not known."""
        now = self._loop.time()
        for worker in list(self._workers):
            deadline = worker.deadline()
            if deadline is None or now < deadline:
                continue
            self._blame(worker, Failure(too_long(self._order.timeout_s)))
            self._replace(worker)
        self._watch()

    def _blame(self, worker: VerdictProcess, failure: Failure) -> None:
        """Settle the response that a worker ended with; the others are asked for again."""
        items = list(worker.in_flight.values())
        if worker.is_async and len(items) > 1:
            for item in items:
                item.alone = True
        elif items:
            first = items[0]
            self.slowest_s = max(self.slowest_s, self._loop.time() - first.began)
            _settle(first, failure)
            del worker.in_flight[first.number]

    async def _bury(self, worker: VerdictProcess) -> None:
        """Of a worker that closed its link, at its end or before it: say which, and what it ended of."""
        code = await worker.own_end()
        worker.kill()  # what it leaves
        if worker not in self._workers:
            return
        how = _CLOSED if code in (None, LINK_CLOSED) else f"ended its process ({_name(code)})"
        if not worker.is_ready:
            self._failed_starts += 1
            if self._ready.done() and self._failed_starts <= _MOST_FAILED_STARTS:  # it was imported before
                self._replace(worker)
                return
            problem = f"{self._order.function} {how} while it was imported"
            self._fail(UserFault(self._order.where, problem, "mend what it does when it is imported"))
            return
        self._blame(worker, Failure(how))
        self._replace(worker)

    def _replace(self, worker: VerdictProcess) -> None:
        self._waiting.extendleft(reversed(worker.in_flight.values()))
        worker.in_flight = {}
        self._remove(worker)
        if len(self._workers) < self._num_workers:
            self._spawn(self._begin())
        self._feed()

    def _remove(self, worker: VerdictProcess) -> None:
        for item in worker.in_flight.values():
            item.found.cancel()
        worker.kill()
        self._workers.remove(worker)
        self._spawn(asyncio.to_thread(worker.process.wait))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(code: int) -> str:
    """How a process ended: its exit code, or -1 times the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def _settle(item: Item, found: Verdict | Failure) -> None:
    if not item.found.done():
        item.found.set_result(found)


def _plain(value: Any) -> Any:
    """What JSON has no word for: arrays as lists, bytes as text, dates and all else as they write themselves."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
