"""The worker processes of one reward function: a verdict that hangs, crashes or fills the memory costs no other."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from megarl.rollout.rewards import LARGEST, Failure, Verdict
from megarl.rollout.verdicts.process import AT_ONCE, Request, RewardSpec, VerdictProcess
from megarl.rollout.verdicts.worker import SOCKET_CLOSED, too_long
from megarl.types import UserFault

_BATCH = 16  # the most responses that wait for one that hangs
_BATCH_S = 0.01
_MOST_FAILED_STARTS = 3
_GARBAGE, _CLOSED = "wrote to the socket of its worker process", "closed the socket of its worker process"


class Pool:
    """The workers of one function. Everything happens in the loop that runs `start`."""

    def __init__(self, spec: RewardSpec, num_workers: int) -> None:
        self._spec, self._num_workers = spec, num_workers
        self._loop = asyncio.get_running_loop()
        self._workers: list[VerdictProcess] = []
        self._waiting: deque[Request] = deque()
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fault: UserFault | None = None
        self._ready = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._failed_starts = 0  # consecutive ones
        self.slowest_s = 0.0  # of all verdicts so far

    async def start(self) -> None:
        """Raises UserFault when the function cannot be used."""
        for _ in range(self._num_workers):
            self._begin()
        await self._ready

    async def verdicts(self, answer: str, row: Mapping[str, Any], responses: Sequence[str]) -> list[Verdict | Failure]:
        """In the order of the responses. Raises UserFault when the function can no longer be used."""
        if self._fault:
            raise self._fault
        try:
            context = json.dumps([answer, row], default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            return [Failure(f"the row cannot be sent to its process ({error})") for _ in responses]
        requests = [Request(next(self._numbers), context, one, self._loop.create_future()) for one in responses]
        self._waiting += requests
        self._feed()
        return await asyncio.gather(*(request.result for request in requests))

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    async def end(self) -> None:
        """Kill and reap every worker; callers that wait for verdicts are cancelled."""
        self._num_workers = 0
        for worker in list(self._workers):
            self._remove(worker)
        for request in self._waiting:
            request.result.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self) -> None:
        """Start one more worker; the time of its import is not part of any verdict's time."""
        try:
            worker = VerdictProcess(self._spec)
        except OSError as error:
            self._fail(UserFault("reward.workers", f"a process cannot be started ({error})", "give it more room"))
            return
        self._workers.append(worker)
        self._spawn(self._serve(worker))
        self._loop.call_later(self._spec.start_s, self._give_up_start, worker)

    async def _serve(self, worker: VerdictProcess) -> None:
        """Read a worker's messages to their end, then replace it if it ended by itself or others killed it."""
        async for message in worker.messages():
            if worker.is_ready:
                self._receive(worker, message)
            else:
                self._started(worker, message)
        if not worker.is_gone:
            await self._bury(worker)

    def _started(self, worker: VerdictProcess, message: list[Any] | None) -> None:
        match message:
            case [bool(is_async)]:
                worker.is_ready, worker.is_async = True, is_async
            case [str(where), str(problem), str(mend)]:
                self._fail(UserFault(where, problem, mend))
                return
            case _:
                problem = f"{self._spec.function} {_GARBAGE} while it was imported"
                self._fail(UserFault(self._spec.where, problem, "let it write only to files that it opened itself"))
                return
        self._failed_starts = 0
        if all(one.is_ready for one in self._workers) and not self._ready.done():
            self._ready.set_result(None)
        self._feed()

    def _give_up_start(self, worker: VerdictProcess) -> None:
        if worker in self._workers and not worker.is_ready:
            problem = f"{self._spec.function} was not imported within {self._spec.start_s:g} s"
            self._fail(UserFault(self._spec.where, problem, "make its import faster, or raise run.timeout_s"))

    def _receive(self, worker: VerdictProcess, message: list[Any] | None) -> None:
        """Settle a response. A message of another form, or about no response in flight, was written by the function."""
        result: Verdict | Failure
        match message:
            case [int(number), str(words), bool(is_last)] if number in worker.in_flight:
                result = Failure(words)
            case [int(number), int() | float() as reward, bool(correct), str() | None as answer] if (
                number in worker.in_flight and abs(reward) <= LARGEST
            ):
                result, is_last = Verdict(reward, correct, answer), False
            case _:
                self._replace(worker, Failure(_GARBAGE))
                return
        now = self._loop.time()
        self._settle(worker.in_flight.pop(number), result, now)
        if is_last:
            self._replace(worker)
            return
        following = next(iter(worker.in_flight.values()), None)
        if not worker.is_async and following:
            following.began = now
        elif not worker.is_async:
            pace_s = (now - worker.batch_began) / worker.batch_size
            worker.batch = max(1, min(_BATCH, int(_BATCH_S / max(pace_s, 1e-6))))
        self._feed()

    def _fail(self, fault: UserFault) -> None:
        """The function cannot be used: all callers that wait get the fault."""
        self._fault = self._fault or fault
        self._num_workers = 0
        for worker in list(self._workers):
            self._waiting += worker.in_flight.values()
            worker.in_flight = {}
            self._remove(worker)
        for request in self._waiting:
            if not request.result.done():
                request.result.set_exception(fault)
        self._waiting.clear()
        if not self._ready.done():
            self._ready.set_exception(fault)

    def _feed(self) -> None:
        """Send waiting responses to workers that have room, and set the timer."""
        for worker in self._workers:
            if worker.has_room():
                self._fill(worker)
        self._set_timer()

    def _fill(self, worker: VerdictProcess) -> None:
        now, most = self._loop.time(), AT_ONCE - len(worker.in_flight) if worker.is_async else worker.batch
        taken = 0
        while self._waiting and taken < most:
            request = self._waiting[0]
            if request.alone and worker.in_flight:
                break
            self._waiting.popleft()
            if request.result.done():  # its caller was cancelled
                continue
            request.began = now
            worker.send(request)
            taken += 1
            if request.alone:
                break
        worker.batch_began, worker.batch_size = now, max(taken, 1)

    def _set_timer(self) -> None:
        """Set the only timer to the first deadline of all workers."""
        if self._timer:
            self._timer.cancel()
        deadlines = [worker.deadline() for worker in self._workers]
        first = min((one for one in deadlines if one is not None), default=None)
        self._timer = self._loop.call_at(first, self._expire) if first is not None else None

    def _expire(self) -> None:
        """Replace the workers whose deadline has passed."""
        now = self._loop.time()
        for worker in list(self._workers):
            deadline = worker.deadline()
            if deadline is not None and now >= deadline:
                self._replace(worker, Failure(too_long(self._spec.timeout_s)))
        self._set_timer()

    async def _bury(self, worker: VerdictProcess) -> None:
        """Replace a worker that has closed its socket, by its end or before it; its first response failed by that."""
        code = await worker.exit_code()
        worker.kill()  # also what it has started
        if worker not in self._workers:
            return
        how = _CLOSED if code in (None, SOCKET_CLOSED) else f"ended its process ({_name(code)})"
        if worker.is_ready:
            self._replace(worker, Failure(how))
            return
        self._failed_starts += 1
        if self._ready.done() and self._failed_starts <= _MOST_FAILED_STARTS:  # it was imported before
            self._replace(worker)
            return
        problem = f"{self._spec.function} {how} while it was imported"
        self._fail(UserFault(self._spec.where, problem, "mend what it does when it is imported"))

    def _replace(self, worker: VerdictProcess, failure: Failure | None = None) -> None:
        """Kill a worker and start another. failure: of the response that is to blame; the others are scored again.

        Of several responses in flight to an asynchronous function it is not known which one is to blame: all are
        scored again, one at a time.
        """
        requests = list(worker.in_flight.values())
        if failure and worker.is_async and len(requests) > 1:
            for request in requests:
                request.alone = True
        elif failure and requests:
            self._settle(requests.pop(0), failure, self._loop.time())
        self._waiting.extendleft(reversed(requests))
        worker.in_flight = {}
        self._remove(worker)
        if len(self._workers) < self._num_workers:
            self._begin()
        self._feed()

    def _settle(self, request: Request, result: Verdict | Failure, now: float) -> None:
        self.slowest_s = max(self.slowest_s, now - request.began)
        if not request.result.done():
            request.result.set_result(result)

    def _remove(self, worker: VerdictProcess) -> None:
        for request in worker.in_flight.values():
            request.result.cancel()
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


def _plain(value: Any) -> Any:
    """A value that JSON has no type for: arrays become lists; bytes, dates and all others become text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
