"""The worker processes of agents, seen from their parent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.environments.agents.agent_loading import AGENT
from megarl.environments.agents.agent_requests import AgentRequests, Outcome
from megarl.environments.agents.chat import ChatRequest
from megarl.environments.agents.chat_client import AT_ONCE, MOST_BYTES
from megarl.isolation.child import OUT_OF_MEMORY, too_long
from megarl.isolation.pool import GARBAGE, WorkerPool
from megarl.isolation.process import Job, ProcessEnd, WorkerProcess, as_line, read_reward_result
from megarl.timeline import recorder
from megarl.types.conditions import RunningJob
from megarl.types.json_objects import CallArguments
from megarl.types.reward_result import Failure, RewardResult

_GRACE_S = 2.0  # in which a run ends that was cancelled
_MOST_BEGINS = 3  # of a run that has not asked the model, in processes that others may have ended
_LONGEST_LINE_BYTES = MOST_BYTES + 2**20

RunResult = RewardResult | Failure | None


@dataclass(frozen=True)
class AgentSettings:
    """What runs episodes, as `module:name`, with its keywords, and the limits of its processes.

    memory_mb: of a process, beyond what loading takes. start_s: limit of the import. prepares: whether `prepare` is
    called, which may need files of the run's machine.
    """

    agent: str
    arguments: CallArguments = field(default_factory=dict)
    workers: int = 2
    memory_mb: int = 1024
    start_s: float = 600.0
    prepares: bool = True


@dataclass(kw_only=True)
class AgentRun(Job):
    """An episode's run of the agent. host: the process that it is in. begins: how often it has begun.

    cancelled_at: when it was told to end, because its time was over or its caller does not wait any more.
    """

    line: bytes = field(repr=False)  # it has the key of the endpoint
    timeout_s: float
    requests: AgentRequests
    host: AgentProcess | None = None
    begins: int = 0
    has_asked: bool = False
    cancelled_at: float | None = None

    def ends_at(self) -> float:
        """Its deadline; after that, the end of the grace."""
        if self.cancelled_at is None:
            return self.began + self.timeout_s
        return self.cancelled_at + _GRACE_S


class AgentProcess(WorkerProcess):
    """One process with many runs. is_retired: it gets no other, and is ended after those that it has."""

    def __init__(self, settings: AgentSettings) -> None:
        """Raises OSError when no process can be started."""
        super().__init__(
            "megarl.environments.agents.agent_host", vars(settings), _LONGEST_LINE_BYTES
        )
        self.is_retired = False

    def has_room(self) -> bool:
        return (
            self.is_ready
            and not self.is_ending
            and not self.is_retired
            and len(self.in_flight) < AT_ONCE
        )

    def deadline(self) -> float | None:
        if self.is_ending:
            return None
        return min((run.ends_at() for run in self.in_flight.values()), default=None)


def overdue(timeout_s: float) -> Failure:
    """The result of a run that was cancelled when its time was over."""
    return Failure(too_long(timeout_s))


class AgentWorkers(WorkerPool[AgentProcess]):
    """All processes. Everything happens in the loop that runs `start`.

    A run whose time is over is cancelled. If it does not end in the grace, its process is retired while it still
    answers: it gets no other run, a new process takes its place, and it is killed when its other runs have ended. So
    it is with a process whose memory is full. There are at most as many retired processes as others.

    A process that does not answer is killed. The runs that were in it, and in any process that ends by itself, begin
    anew where they have not asked the model yet; otherwise they are failures.
    """

    def __init__(self, settings: AgentSettings) -> None:
        super().__init__(AGENT, settings.agent, settings.workers, settings.start_s)
        self._settings = settings

    async def run(
        self,
        message: Sequence[Any],
        timeout_s: float,
        requests: AgentRequests,
        *,
        has_asked: bool = False,
    ) -> RunResult:
        """Run an episode. message: row, messages of the prompt, seed, access, as the process reads them.

        timeout_s: from the time that a process begins with it. has_asked: it may have asked without being seen here, so
        it must not begin anew. Raises UserError when the processes cannot be started again.
        """
        if self._error:
            raise self._error
        number = next(self._numbers)
        try:
            line = as_line([number, "run", *message])
        except (TypeError, ValueError, RecursionError) as error:
            return Failure(f"cannot be sent its row ({error})")
        result = self._loop.create_future()
        run = AgentRun(
            number, result, line=line, timeout_s=timeout_s, requests=requests, has_asked=has_asked
        )
        self._waiting.append(run)
        self._feed()
        try:
            return await run.result
        finally:
            if run.began:
                recorder.add(recorder.TOOLS, "agent", run.began, cause=recorder.cause())
            self._cancel(run)

    def _answer(self, run: AgentRun, request: int, outcome: Outcome, content: object) -> None:
        """Answer a request, in any thread. content: the assistant's message, or the words of the refusal."""
        message = [run.number, outcome, request, content]
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._write, run, message)

    def _write(self, run: AgentRun, message: Sequence[Any]) -> None:
        if run.host and run.number in run.host.in_flight:
            run.host.write(as_line(message))

    def _cancel(self, run: AgentRun) -> None:
        """Tell a run to end, if it is in a process."""
        if run.host and run.number in run.host.in_flight and run.cancelled_at is None:
            run.cancelled_at = self._loop.time()
            self._write(run, [run.number, "cancel"])
            self._set_timer()

    def _described(self, job: AgentRun, seconds: float, pid: int) -> RunningJob:
        """Its line has the key of the endpoint, and is not shown."""
        asked = "has asked" if job.has_asked else "has not asked"
        return RunningJob(
            "agent", self._name, f"run {job.number}, which {asked} the model", seconds, pid
        )

    def _new(self) -> AgentProcess:
        return AgentProcess(self._settings)

    def _started(self, worker: AgentProcess, message: Sequence[Any]) -> bool:
        return message == ["ready"]

    def _feed(self) -> None:
        """Give each waiting run to the process that has the fewest."""
        while self._waiting:
            ready = [worker for worker in self._workers if worker.has_room()]
            if not ready:
                break
            run: AgentRun = self._waiting.popleft()
            if run.result.done():  # its caller was cancelled
                continue
            run.host = min(ready, key=lambda worker: len(worker.in_flight))
            run.host.in_flight[run.number] = run
            run.began = self._loop.time()
            run.begins += 1
            run.requests.begin()
            run.host.write(run.line)
        self._set_timer()

    def _receive(self, worker: AgentProcess, message: list[Any] | None) -> None:
        match message:
            case [int(number), "chat", int(request), [list(messages), list(tools)]]:
                if (run := worker.in_flight.get(number)) and run.cancelled_at is None:
                    run.has_asked = True
                    reply = partial(self._answer, run, request)
                    run.requests.ask(request, ChatRequest(messages, tools), reply)
            case [int(number), "drop", int(request), None]:
                if run := worker.in_flight.get(number):
                    run.requests.drop(request)
            case [int(), "cancelling"]:
                pass  # it has told that the process still answers
            case [int(number), "end", None, bool(is_spoiled)]:
                self._end_run(worker, number, None, is_spoiled=is_spoiled)
            case [int(number), "end", list(reward_result), bool(is_spoiled)] if (
                result := read_reward_result(reward_result)
            ):
                self._end_run(worker, number, result, is_spoiled=is_spoiled)
            case [int(number), "error", str(words), bool(is_spoiled)]:
                self._end_run(worker, number, Failure(words), is_spoiled=is_spoiled)
            case _:
                self._replace(worker, GARBAGE)

    def _end_run(
        self, worker: AgentProcess, number: int, result: RunResult, *, is_spoiled: bool
    ) -> None:
        """A run has ended by itself, or because it was cancelled."""
        run = worker.in_flight.pop(number, None)
        if run is None:  # it was settled before
            pass
        elif run.cancelled_at is not None:
            self._settle(run, overdue(run.timeout_s))
        elif result == Failure(OUT_OF_MEMORY) and worker.in_flight:
            self._begin_anew(run, OUT_OF_MEMORY)  # the others may have filled it
        else:
            self._settle(run, result)
        if is_spoiled or worker.is_retired:
            self._retire(worker)
        self._feed()

    def _late(self, worker: AgentProcess) -> None:
        now = self._loop.time()
        late = [run for run in worker.in_flight.values() if now >= run.ends_at()]
        stuck = [run for run in late if run.cancelled_at is not None]
        for run in late:
            self._cancel(run)
        if not stuck:
            return
        for run in stuck:
            del worker.in_flight[run.number]
            self._settle(run, overdue(run.timeout_s))
        if worker.message_at > max(run.cancelled_at or 0.0 for run in stuck):
            self._retire(worker)
        else:
            self._kill(worker, f"another agent {too_long(stuck[0].timeout_s)}")

    def _retire(self, worker: AgentProcess) -> None:
        """Give a process no other run, and end it as soon as it has none."""
        if not worker.in_flight:
            self._kill(worker)
        elif worker.is_retired:
            return
        elif sum(other.is_retired for other in self._workers) >= self._num_workers:
            self._kill(worker, "another agent could not be ended")
        else:
            worker.is_retired = True
            self._begin_missing()
            self._set_timer()

    def _replace(self, worker: AgentProcess, end: ProcessEnd | None = None) -> None:
        if end is None:
            self._kill(worker)
            return
        if len(worker.in_flight) == 1 and not worker.is_retired and not end.is_foreign:
            (run,) = worker.in_flight.values()
            self._settle(run, Failure(end.words))
        self._kill(worker, f"it or another agent {end.words}")

    def _kill(self, worker: AgentProcess, cause: str = "") -> None:
        """Kill a process and start another. cause: told to the runs that were in it and cannot begin anew."""
        self.num_ended += 1
        for run in reversed(self._remove(worker)):
            self._begin_anew(run, f"its process was ended because {cause}")
        self._begin_missing()
        self._feed()

    def _begin_anew(self, run: AgentRun, words: str) -> None:
        """Let a run wait for another process; where it has asked the model, it is a failure with these words."""
        if run.result.done():
            return
        if run.cancelled_at is not None:
            self._settle(run, overdue(run.timeout_s))
        elif run.has_asked or run.begins >= _MOST_BEGINS:
            self._settle(run, Failure(words))
        else:
            run.host = None
            self._waiting.appendleft(run)

    def _num_missing(self) -> int:
        """A retired process is missing, too."""
        return self._num_workers - sum(not worker.is_retired for worker in self._workers)
