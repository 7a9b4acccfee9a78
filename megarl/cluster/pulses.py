"""Heartbeats of workers: for how long each has not answered, and how long that may last."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
import ray.exceptions

from megarl.cluster.actor import Pulse, Ref, Worker
from megarl.cluster.deadline import Deadline

_LEAST_PERIOD_SHARE = 0.9  # that has passed when a look counts
_MOST_PERIODS = 2  # between two looks, unless this process was suspended
# between two heartbeats of all workers there is so much for each: asking takes this process a fiftieth of it
_PULSE_S = 0.01


class Pulses:
    """Sends each worker a heartbeat request once a period, and counts for how long it has not answered.

    If a laptop or Slurm suspends everything at once, no worker counts as silent: of a long time between two looks a
    period counts. Heartbeats are answered during calls, however long these take.
    """

    def __init__(self, bound_s: float, period_s: float = 10.0) -> None:
        """bound_s: the silence to detect; the period is a tenth of it, at most `period_s`."""
        self._period_s = max(0.1, min(period_s, bound_s / 10))
        self._deadline = Deadline(bound_s)
        self._looked_at = -math.inf
        self._asked: dict[Worker, Ref] = {}
        self._silent_s: defaultdict[Worker, float] = defaultdict(float)
        # process ids of the workers that have ever answered, dead or alive
        self.pids: dict[Worker, int] = {}
        # those that had started when they answered
        self._started: set[Worker] = set()
        # of those that compute, by their last answers
        self.still_s: dict[Worker, float] = {}

    def look(self, workers: Sequence[Worker]) -> None:
        """Once a period, count the missing answers and ask again."""
        now = time.monotonic()
        passed_s = now - self._looked_at
        period_s = max(self._period_s, _PULSE_S * len(workers))
        # who looks once a period may be a little early, which must not cost a whole one
        if passed_s < _LEAST_PERIOD_SHARE * period_s:
            return
        self._looked_at = now
        if passed_s > _MOST_PERIODS * period_s:
            # this process itself was suspended
            passed_s = self._period_s
        for worker in self.unanswered():
            self._silent_s[worker] += passed_s
        self.ask(workers)

    def ask(self, workers: Sequence[Worker]) -> None:
        """Ask every worker that has answered its last request."""
        silent = self.unanswered()
        for worker in workers:
            if worker in silent:
                continue
            if worker in self._started:
                self._deadline.observe(self.silence_s(worker))
            if worker in self._asked and (worker.computes or worker not in self._started):
                self._note_answer(worker)
            self._silent_s[worker] = 0.0
            self._asked[worker] = worker.pulse()

    def _note_answer(self, worker: Worker) -> None:
        with suppress(ray.exceptions.RayError):
            pulse: Pulse = ray.get(self._asked[worker])
            self.pids[worker] = pulse.pid
            self.still_s[worker] = pulse.still_s
            if pulse.has_started:
                self._started.add(worker)

    def unanswered(self) -> list[Worker]:
        """The workers that have not answered their last request; a dead process is not among them."""
        if not self._asked:
            return []
        refs = list(self._asked.values())
        _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [worker for worker, ref in self._asked.items() if ref in waiting]

    def is_overdue(self, worker: Worker) -> bool:
        """Whether a worker is silent for longer than the silences that have ended let expect.

        While it starts, it has the whole bound.
        """
        if worker in self._started:
            return self.silence_s(worker) >= self._deadline.limit_s
        return self.silence_s(worker) >= self._deadline.ceiling_s

    def silence_s(self, worker: Worker) -> float:
        """For how long the worker has not answered, from one look to another."""
        return self._silent_s[worker]
