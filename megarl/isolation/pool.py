"""The worker processes of one user's function: a job that hangs, crashes or fills the memory costs no other."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

from megarl.isolation.child import MEMORY_FULL, OUT_OF_MEMORY, SOCKET_CLOSED
from megarl.isolation.loop_thread import LoopThread
from megarl.isolation.process import Lost, ProcessEnd, WorkerProcess, describe_exit
from megarl.isolation.service_log import ServiceLog
from megarl.types import UserError
from megarl.types.conditions import RunningJob
from megarl.types.worker_faults import WorkerFaults

_MOST_FAILED_STARTS = 4
_FIRST_START_WAIT_S = 0.5  # after a start that failed; twice as long after each further one
_LOOK_S = 5.0  # how often it is looked for processes that are stopped
_FOREIGN_ENDS = (-signal.SIGKILL, -signal.SIGTERM)  # signals that processes get from others
GARBAGE = ProcessEnd("ended", "wrote to the socket of its worker process")
_CLOSED = ProcessEnd("ended", "closed the socket of its worker process")
_STOPPED = ProcessEnd("ended", "stopped its process", is_foreign=True)

Process = TypeVar("Process", bound=WorkerProcess)
AnyPool = TypeVar("AnyPool", bound="WorkerPool[Any]")


def start_pool(thread: LoopThread, build: Callable[[], AnyPool]) -> AnyPool:
    """The pool that `build` makes in the thread, once its processes have imported everything.

    Raises UserError when they cannot; then the thread has ended.
    """
    pool = thread.make(build)
    try:
        thread.submit(pool.start()).result()
    except BaseException:
        thread.end(pool.end())
        raise
    return pool


class WorkerPool(Generic[Process]):
    """Starts the processes, sends them jobs in order, and replaces those that end, are stopped or exceed a limit.

    Everything but `take_faults` happens in the loop that runs `start`; the kernel ends the processes with that thread.
    A subclass says what a process is (`_new`), what it takes (`_fill`), and what its messages mean (`_started`,
    `_receive`). Jobs of a process that others may have ended or stopped are sent once more, to another.
    """

    def __init__(self, where: str, name: str, num_workers: int, start_s: float) -> None:
        """where: the recipe key that names what the processes import; name: its value; start_s: the import's limit."""
        self._where = where
        self._name = name
        self._num_workers = num_workers
        self._start_s = start_s
        self._loop = asyncio.get_running_loop()
        self._workers: list[Process] = []
        self._waiting: deque[Any] = deque()
        self._numbers = count()
        self._error: UserError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._failed_starts = 0  # consecutive ones
        self._next_start: asyncio.TimerHandle | None = None  # after one that failed
        self._stopped: set[Process] = set()  # at the last look
        self._services = ServiceLog(where, self._loop.time)
        self.num_ended = 0  # processes that were ended by a limit, by others or by themselves
        self._num_told = 0  # of them, in the faults that were taken

    def _new(self) -> Process:
        """A new process. Raises OSError when none can be started."""
        raise NotImplementedError

    def _started(self, worker: Process, message: Sequence[Any]) -> bool:
        """Take in the first message of a process; False: it is not one."""
        raise NotImplementedError

    def _receive(self, worker: Process, message: list[Any] | None) -> None:
        """Settle the job that a message is about. Another message was written by the user's function."""
        raise NotImplementedError

    def _fill(self, worker: Process) -> None:
        """Send waiting jobs to a process, as many as it has room for."""
        raise NotImplementedError

    def _failed(self, end: ProcessEnd) -> Any:
        """The result of the job that is to blame for a process's end."""
        return end

    async def start(self) -> None:
        """Raises UserError when the function cannot be used."""
        self._begin_missing()
        self._loop.call_later(_LOOK_S, self._look)
        await self._ready

    def take_faults(self) -> WorkerFaults:
        """What has happened since the last call. May be called in any thread."""
        num_ended = self.num_ended
        faults = WorkerFaults(num_ended - self._num_told, self._services.take())
        self._num_told = num_ended
        return faults

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def running(self) -> list[RunningJob]:
        """The jobs that the processes have."""
        now_s = self._loop.time()
        return [
            self._described(job, now_s - job.began, worker.pid)
            for worker in self._workers
            for job in worker.in_flight.values()
        ]

    def _described(self, job: Any, seconds: float, pid: int) -> RunningJob:
        """A job in words."""
        raise NotImplementedError

    async def end(self) -> None:
        """Kill and reap every process; callers that wait for results are cancelled."""
        for job in self._remove_all():
            job.result.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _num_missing(self) -> int:
        """How many processes there are too few."""
        return self._num_workers - len(self._workers)

    def _begin_missing(self) -> None:
        """Start the processes that are missing, unless a start has failed a moment ago."""
        while self._next_start is None and self._num_missing() > 0:
            self._begin()

    def _begin(self) -> None:
        """Start one more process; the time of its import is not part of any job's time."""
        try:
            worker = self._new()
        except OSError as error:
            where = f"{self._where.partition('.')[0]}.workers"
            problem = f"a process cannot be started ({error})"
            self._begin_later(UserError(where, problem, "give it more room"))
            return
        self._workers.append(worker)
        self._spawn(self._serve(worker))
        self._loop.call_later(self._start_s, self._give_up_start, worker)

    def _begin_later(self, error: UserError) -> None:
        """A start has failed: try again after a time that doubles, and then give up with the error."""
        self._failed_starts += 1
        if self._failed_starts > _MOST_FAILED_STARTS:
            self._fail(error)
        elif self._next_start is None:
            wait_s = _FIRST_START_WAIT_S * 2 ** (self._failed_starts - 1)
            self._next_start = self._loop.call_later(wait_s, self._begin_again)

    def _begin_again(self) -> None:
        self._next_start = None
        self._begin_missing()

    async def _serve(self, worker: Process) -> None:
        """Read a process's messages to their end, then replace it if it ended by itself or others killed it."""
        async for message in worker.messages():
            if message and self._services.take_in(worker, message):
                continue
            if worker.is_ready:
                self._receive(worker, message)
            else:
                self._begun(worker, message)
        if not worker.is_gone:
            await self._bury(worker)

    def _begun(self, worker: Process, message: list[Any] | None) -> None:
        match message:
            case [str(where), str(problem), str(hint)]:
                self._fail(UserError(where, problem, hint))
                return
            case list() if self._started(worker, message):
                worker.is_ready = True
            case _:
                problem = f"{self._name} {GARBAGE.words} while it was imported"
                self._fail(
                    UserError(
                        self._where, problem, "let it write only to files that it opened itself"
                    )
                )
                return
        self._failed_starts = 0
        if all(worker.is_ready for worker in self._workers) and not self._ready.done():
            self._ready.set_result(None)
        self._feed()

    def _give_up_start(self, worker: Process) -> None:
        if worker in self._workers and not worker.is_ready:
            problem = f"{self._name} was not imported within {self._start_s:g} s"
            self._fail(
                UserError(self._where, problem, "make its import faster, or raise run.timeout_s")
            )

    def _fail(self, error: UserError) -> None:
        """The function cannot be used: all callers that wait get the error."""
        self._error = self._error or error
        for job in self._remove_all():
            if not job.result.done():
                job.result.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)

    def _feed(self) -> None:
        """Send waiting jobs to the processes that have room, the least busy first, and set the timer."""
        for worker in sorted(self._workers, key=lambda worker: len(worker.in_flight)):
            if worker.is_ready and not worker.is_ending:
                self._fill(worker)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the only timer to the first deadline of all processes."""
        if self._timer:
            self._timer.cancel()
        deadlines = [worker.deadline() for worker in self._workers]
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        self._timer = None if first is None else self._loop.call_at(first, self._expire)

    def _expire(self) -> None:
        """Act on the processes whose deadline has passed."""
        now = self._loop.time()
        for worker in list(self._workers):
            deadline = worker.deadline()
            if deadline is not None and now >= deadline:
                self._late(worker)
        self._set_timer()

    def _late(self, worker: Process) -> None:
        """A process's deadline has passed: it is replaced."""
        self._replace(worker, replace(self._overdue(), is_foreign=worker.is_stopped))

    def _look(self) -> None:
        """Replace the processes that are stopped, and were when it was looked before."""
        stopped = {worker for worker in self._workers if worker.is_stopped}
        for worker in stopped & self._stopped:
            self._ended(worker, _STOPPED)
        self._stopped = stopped
        if self._num_workers:
            self._loop.call_later(_LOOK_S, self._look)

    def _overdue(self) -> ProcessEnd:
        """The end of a process whose deadline has passed."""
        raise NotImplementedError

    async def _bury(self, worker: Process) -> None:
        """Replace a process that has closed its socket, by its end or before it; the job that is to blame failed."""
        code = await worker.exit_code()
        worker.kill()  # also what it has started
        if worker not in self._workers:
            return
        end = _CLOSED
        if code == MEMORY_FULL:
            end = ProcessEnd("memory", OUT_OF_MEMORY)
        elif code not in (None, SOCKET_CLOSED):
            words = f"ended its process ({describe_exit(code)})"
            end = ProcessEnd("ended", words, is_foreign=code in _FOREIGN_ENDS)
        self._ended(worker, end)

    def _ended(self, worker: Process, end: ProcessEnd) -> None:
        """Replace a process that has ended or cannot go on, for ever only where it can be imported."""
        if worker.is_ready:
            self._replace(worker, end)
            return
        problem = f"{self._name} {end.words} while it was imported"
        hint = "correct what it does when it is imported"
        if end.is_foreign:
            hint = "see who ended it, perhaps the machine for want of memory"
        error = UserError(self._where, problem, hint)
        if self._ready.done() or end.is_foreign:  # it was imported before, or can be
            self._begin_later(error)
        else:
            self._fail(error)
        if worker in self._workers:
            self._replace(worker)

    def _replace(self, worker: Process, end: ProcessEnd | None = None) -> None:
        """Kill a process and start another. end: of the job that is to blame; the others are sent again.

        Of several jobs in flight it may not be known which one is to blame: all are sent again, one at a time. Where
        others may have ended the process, none is to blame, unless this happens to a job again.
        """
        self.num_ended += 1
        in_flight = list(worker.in_flight.values())
        is_foreign = end is not None and end.is_foreign
        is_foreign = is_foreign and not any(job.was_killed for job in in_flight)
        culprit = worker.culprit() if end and not is_foreign else None
        is_unclear = end is not None and not is_foreign and culprit is None
        others = [job for job in self._remove(worker) if job is not culprit]
        if culprit and end:
            self._settle(culprit, self._failed(end))
        for job in in_flight:
            job.alone = job.alone or is_unclear
            job.was_killed = job.was_killed or is_foreign
        for job in others:
            if job.worker is not None and not job.result.done():
                was_in_flight = job in in_flight
                lost = Lost(is_unclear and was_in_flight, was_killed=is_foreign and was_in_flight)
                job.result.set_result(lost)
        self._waiting.extendleft(job for job in reversed(others) if job.worker is None)
        self._begin_missing()
        self._feed()

    def _settle(self, job: Any, result: Any) -> None:
        if not job.result.done():
            job.result.set_result(result)

    def _remove_all(self) -> list[Any]:
        """Kill every process and start no other; the jobs that there are."""
        self._num_workers = 0
        if self._next_start:
            self._next_start.cancel()
        jobs = list(self._waiting)
        self._waiting.clear()
        for worker in list(self._workers):
            jobs += self._remove(worker)
        return jobs

    def _remove(self, worker: Process) -> list[Any]:
        """Kill and reap a process; the jobs that it had, in flight and waiting for it."""
        jobs = [*worker.in_flight.values(), *worker.waiting]
        worker.in_flight = {}
        worker.waiting.clear()
        worker.kill()
        self._workers.remove(worker)
        self._services.forget(worker)
        self._spawn(asyncio.to_thread(worker.reap))
        return jobs

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
