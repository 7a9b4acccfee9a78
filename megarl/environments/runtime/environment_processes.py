"""The worker processes of tools and environments, seen from their parent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megarl.environments.runtime.results import CallError, CallResult
from megarl.environments.runtime.tool_loading import ENVIRONMENT, TOOLS
from megarl.isolation.child import too_long
from megarl.isolation.pool import GARBAGE, WorkerPool
from megarl.isolation.process import (
    Job,
    Lost,
    ProcessEnd,
    WorkerProcess,
    as_line,
    read_reward_result,
)
from megarl.printable import short
from megarl.timeline import recorder
from megarl.types import UserError
from megarl.types.conditions import RunningJob
from megarl.types.json_objects import CallArguments, Columns, JsonObject
from megarl.types.reward_result import LARGEST_REWARD, RewardResult

_AT_ONCE = 256  # calls of `async def` functions in flight to a process
_GRACE_S = 1.0  # in which a process cancels a call of such a function that takes too long
_LEAST_LINE_BYTES = 2**20
_BYTES_OF_JSON = 6  # that one byte of text can become, as \u0000
_ERRORS = ("arguments", "raised", "result", "timeout", "memory")


@dataclass(frozen=True)
class EnvironmentSettings:
    """What episodes are given, and the limits of its processes. One of `tools` and `environment`, as `module:name`.

    arguments: keywords of the environment's constructor, or bound to the tools that take them. call_timeout_s: of one
    call, reset, reply, reward or close. memory_mb: of a process, beyond what loading takes. result_bytes: of one text.
    start_s: limit of the import. prepares: whether `prepare` is called, which may need files of the run's machine.
    """

    tools: tuple[str, ...] = ()
    environment: str | None = None
    arguments: CallArguments = field(default_factory=dict)
    call_timeout_s: float = 10.0
    workers: int = 2
    memory_mb: int = 1024
    result_bytes: int = 2**16
    start_s: float = 600.0
    prepares: bool = True


@dataclass(frozen=True)
class JobFailure:
    """The reason why a job has no result; words say what its function did."""

    kind: CallError
    words: str
    seconds: float = 0.0


JobResult = CallResult | RewardResult | JobFailure | Lost | None


def call_result(name: str, result: JobResult) -> CallResult:
    """A call's result for the model."""
    if isinstance(result, CallResult):
        return result
    assert isinstance(result, JobFailure)
    if result.kind in ("raised", "arguments"):
        words = result.words
    else:
        words = f"{name} {result.words}."
    return CallResult(words, error=result.kind, seconds=result.seconds)


def unknown(name: str, tools: str) -> CallResult:
    """The result of a call of a tool that there is not."""
    return CallResult(f"There is no tool {name!r}. The tools are: {tools}.", error="unknown")


def sentence(name: str, failure: JobFailure) -> str:
    """What the function of this name did."""
    if failure.kind == "raised":
        return f"{name} raised {failure.words}"
    return f"{name} {failure.words}"


@dataclass(kw_only=True)
class EnvironmentJob(Job):
    """An operation of the worker. is_plain: it keeps the process's main thread."""

    line: bytes
    is_plain: bool


@dataclass(frozen=True)
class Offer:
    """What the processes have loaded. is_async: names of tools and reserved methods; has: reserved methods defined."""

    schemas: list[JsonObject]
    is_async: frozenset[str]
    has: frozenset[str]
    is_replayable: bool

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(schema["function"]["name"] for schema in self.schemas)


class EnvironmentProcess(WorkerProcess):
    """One process. It does one plain job at a time, and many of `async def` functions beside it."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Raises OSError when no process can be started."""
        longest = max(_LEAST_LINE_BYTES, _BYTES_OF_JSON * settings.result_bytes + 2**16)
        super().__init__("megarl.environments.runtime.environment_host", vars(settings), longest)
        self._timeout_s = settings.call_timeout_s
        self.instances = 0  # open ones

    def send(self, job: EnvironmentJob) -> None:
        self.in_flight[job.number] = job
        self.write(job.line)

    def deadline(self) -> float | None:
        if self.is_ending:
            return None
        return min((self._ends(job) for job in self.in_flight.values()), default=None)

    def culprit(self) -> EnvironmentJob | None:
        """The only job in flight; or the plain one, where it is overdue and the process has sent messages since."""
        jobs = list(self.in_flight.values())
        if len(jobs) == 1:
            return jobs[0]
        now = asyncio.get_running_loop().time()
        overdue = [
            job
            for job in jobs
            if job.is_plain and now >= self._ends(job) and self.message_at > job.began
        ]
        return next(iter(overdue), None)

    def _ends(self, job: EnvironmentJob) -> float:
        """The job's deadline. With many calls in flight a process may be late in cancelling one that is `async def`:
        its deadline moves while the process still sends messages."""
        end = job.began + self._timeout_s
        if job.is_plain:
            return end
        return max(end, min(self.message_at, end + self._timeout_s)) + _GRACE_S


class EnvironmentWorkers(WorkerPool[EnvironmentProcess]):
    """All processes. A job's result is JobFailure where it is to blame for the end of its process."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        if settings.environment is None:
            where = TOOLS
        else:
            where = ENVIRONMENT
        super().__init__(
            where,
            settings.environment or ", ".join(settings.tools),
            settings.workers,
            settings.start_s,
        )
        self._settings = settings
        self.offer: Offer | None = None
        # by the number of an episode's instance, for people
        self.row_of: Callable[[int], Columns | None] = lambda _: None
        self._has_process = asyncio.Event()

    async def least_busy(self) -> EnvironmentProcess:
        """The process with the fewest instances, when there is one. Raises UserError when there can be none."""
        while not self._error and not self._workers:
            self._has_process.clear()
            await self._has_process.wait()
        if self._error:
            raise self._error
        return min(self._workers, key=lambda worker: worker.instances)

    async def do(
        self,
        message: Sequence[Any],
        *,
        is_plain: bool,
        worker: EnvironmentProcess | None,
        alone: bool = False,
        was_killed: bool = False,
    ) -> JobResult:
        """Do an operation in a process, or in any. Raises UserError when the processes cannot be started again.

        alone, was_killed: as of `Job`.

        Lost: its process has ended, with the state that the operation needs. Raises TypeError, ValueError or
        RecursionError when the message cannot be sent.
        """
        if self._error:
            raise self._error
        if worker is not None and worker.is_gone:
            return Lost(is_suspect=False)
        number = next(self._numbers)
        line = as_line([number, *message])
        job = EnvironmentJob(
            number,
            self._loop.create_future(),
            alone=alone,
            worker=worker,
            was_killed=was_killed,
            line=line,
            is_plain=is_plain,
        )
        (self._waiting if worker is None else worker.waiting).append(job)
        self._feed()
        try:
            return await job.result
        finally:
            if job.began:
                name = message[2] if message[0] == "call" else message[0]
                recorder.add(recorder.TOOLS, name, job.began, cause=recorder.cause())

    def _described(self, job: EnvironmentJob, seconds: float, pid: int) -> RunningJob:
        """A message is its number, the operation, the instance and the rest, of a call the tool and the arguments."""
        _, operation, instance, *rest = json.loads(job.line)
        name = str(rest.pop(0)) if operation == "call" and rest else operation
        subject = f"{short(rest)} of an episode of the row {short(self.row_of(instance))}"
        return RunningJob("tool", name, subject, seconds, pid)

    def restart(self) -> None:
        """Replace every process; jobs that need its state are Lost."""
        for worker in list(self._workers):
            self._replace(worker)

    def _new(self) -> EnvironmentProcess:
        return EnvironmentProcess(self._settings)

    def _started(self, worker: EnvironmentProcess, message: Sequence[Any]) -> bool:
        match message:
            case ["ready", list(schemas), list(is_async), list(has), bool(is_replayable)]:
                self.offer = Offer(schemas, frozenset(is_async), frozenset(has), is_replayable)
                return True
        return False

    def _overdue(self) -> ProcessEnd:
        return ProcessEnd("timeout", too_long(self._settings.call_timeout_s))

    def _failed(self, end: ProcessEnd) -> JobFailure:
        return JobFailure(end.kind, end.words)

    def _fill(self, worker: EnvironmentProcess) -> None:
        for jobs in (worker.waiting, self._waiting):
            kept = []
            while jobs and len(worker.in_flight) < _AT_ONCE:
                job = jobs.popleft()
                if job.result.done():  # its caller was cancelled
                    continue
                if self._may_send(worker, job):
                    job.began = self._loop.time()
                    worker.send(job)
                    continue
                kept.append(job)
                # no other of them has room either
                if job.alone or not (self.offer and self.offer.is_async):
                    break
            jobs.extendleft(reversed(kept))

    def _may_send(self, worker: EnvironmentProcess, job: EnvironmentJob) -> bool:
        flying = worker.in_flight.values()
        if job.alone or any(other.alone for other in flying):
            return not flying
        return not (job.is_plain and any(other.is_plain for other in flying))

    def _receive(self, worker: EnvironmentProcess, message: list[Any] | None) -> None:
        result: JobResult = None
        is_last = False
        match message:
            case [int(number), *_] if number not in worker.in_flight:
                self._replace(worker, GARBAGE)
                return
            case [int(number), "none"]:
                pass
            case [int(number), "text", str(text), int() | float() as reward, bool(done)] if (
                abs(reward) <= LARGEST_REWARD
            ):
                result = CallResult(text, float(reward), done)
            case [int(number), "reward_result", *fields] if result := read_reward_result(fields):
                pass
            case [int(number), "error", str(kind), str(words), bool(is_last)] if kind in _ERRORS:
                result = JobFailure(kind, words)  # type: ignore[arg-type]
            case _:
                self._replace(worker, GARBAGE)
                return
        self._settle(worker.in_flight.pop(number), result)
        if is_last:
            self._replace(worker)
        else:
            self._feed()

    def _settle(self, job: EnvironmentJob, result: JobResult) -> None:
        if isinstance(result, CallResult | JobFailure):
            result = replace(result, seconds=self._loop.time() - job.began)
        super()._settle(job, result)

    def _begin(self) -> None:
        super()._begin()
        self._has_process.set()

    def _fail(self, error: UserError) -> None:
        super()._fail(error)
        self._has_process.set()
