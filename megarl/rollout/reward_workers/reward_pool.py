"""The worker processes of one reward function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.isolation.child import too_long
from megarl.isolation.pool import GARBAGE, WorkerPool
from megarl.isolation.process import ProcessEnd, as_line
from megarl.printable import short
from megarl.rollout.reward_workers.reward_process import Request, RewardProcess, RewardSpec
from megarl.timeline import recorder
from megarl.timeline.recorder import REWARDS
from megarl.types.conditions import RunningJob
from megarl.types.json_objects import Columns
from megarl.types.reward_result import LARGEST_REWARD, Failure, RewardResult

Episodes = Sequence[Mapping[str, Any] | None]


class Pool(WorkerPool[RewardProcess]):
    """The workers of one function. Everything happens in the loop that runs `start`."""

    def __init__(self, spec: RewardSpec, num_workers: int) -> None:
        super().__init__(spec.where, spec.function, num_workers, spec.start_s)
        self._spec = spec
        self.slowest_s = 0.0  # of all verdicts so far
        self._worked_s = 0.0  # by all workers, since it was told
        self._worked_lock = threading.Lock()

    async def reward_results(
        self, answer: str, row: Columns, responses: Sequence[str], episodes: Episodes = ()
    ) -> list[RewardResult | Failure]:
        """In the order of the responses. episodes: of each response, or none where they are no episodes.

        Raises UserError when the function can no longer be used.
        """
        if self._error:
            raise self._error
        try:
            context = as_line([answer, row])
        except (TypeError, ValueError, RecursionError) as error:
            return [Failure(f"the row cannot be sent to its process ({error})") for _ in responses]
        requests = [
            Request(
                next(self._numbers),
                self._loop.create_future(),
                context=context,
                response=response,
                episode=episode,
                sample=sample,
                cause=recorder.cause(),
            )
            for sample, (response, episode) in enumerate(
                zip(responses, episodes or [None] * len(responses), strict=True)
            )
        ]
        self._waiting += requests
        self._feed()
        return await asyncio.gather(*(request.result for request in requests))

    def take_worked_s(self) -> float:
        """For how long its workers have worked since the last call, added up. May be called in any thread."""
        with self._worked_lock:
            for worker in list(self._workers):
                self._count(worker)
            worked_s = self._worked_s
            self._worked_s = 0.0
        return worked_s

    def _count(self, worker: RewardProcess) -> None:
        """Add the time that a worker has worked and that is not yet counted. The caller has the lock."""
        if worker.works_since_s:
            now_s = self._loop.time()
            self._worked_s += now_s - worker.works_since_s
            worker.works_since_s = now_s

    def _stop_work(self, worker: RewardProcess) -> None:
        """The worker has nothing in flight any more."""
        with self._worked_lock:
            self._count(worker)
            worker.works_since_s = 0.0

    def _described(self, job: Request, seconds: float, pid: int) -> RunningJob:
        subject = f"the response {short(job.response)} to the row {short(job.context.decode())}"
        return RunningJob("reward function", self._name, subject, seconds, pid)

    def _new(self) -> RewardProcess:
        return RewardProcess(self._spec)

    def _started(self, worker: RewardProcess, message: Sequence[Any]) -> bool:
        match message:
            case [bool(is_async), bool(takes_episode)]:
                worker.is_async = is_async
                worker.takes_episode = takes_episode
                return True
        return False

    def _failed(self, end: ProcessEnd) -> Failure:
        return Failure(end.words)

    def _overdue(self) -> ProcessEnd:
        return ProcessEnd("timeout", too_long(self._spec.timeout_s))

    def _receive(self, worker: RewardProcess, message: list[Any] | None) -> None:
        result: RewardResult | Failure
        match message:
            case [int(number), str(words), bool(is_last)] if number in worker.in_flight:
                result = Failure(words)
            case [
                int(number),
                int() | float() as reward,
                bool(correct),
                str() | None as answer,
            ] if number in worker.in_flight and abs(reward) <= LARGEST_REWARD:
                result = RewardResult(reward, correct, answer)
                is_last = False
            case _:
                self._replace(worker, GARBAGE)
                return
        self._settle(worker.in_flight.pop(number), result)
        if not worker.in_flight:
            self._stop_work(worker)
        if is_last:
            self._replace(worker)
            return
        self._feed()

    def _remove(self, worker: RewardProcess) -> list[Request]:
        self._stop_work(worker)
        return super()._remove(worker)

    def _fill(self, worker: RewardProcess) -> None:
        while self._waiting and worker.has_room():
            request = self._waiting[0]
            if request.alone and worker.in_flight:
                return
            self._waiting.popleft()
            if not request.result.done():  # its caller was not cancelled
                request.began = self._loop.time()
                if not worker.in_flight:
                    worker.works_since_s = request.began
                worker.send(request)

    def _settle(self, job: Request, result: RewardResult | Failure) -> None:
        self.slowest_s = max(self.slowest_s, self._loop.time() - job.began)
        if job.began:
            recorder.add(REWARDS, self._name, job.began, cause=job.cause, sample=job.sample)
        super()._settle(job, result)
