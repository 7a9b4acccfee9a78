"""One sampling phase: groups go to the engines as these have room, and samples are counted as they finish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.fleet.step_fit import EngineHistory, EngineWork, seconds_of
from megarl.rollout.load_balancing import CompletedSample, RequestBalancer
from megarl.samples.buffer import Entry, PartialSummary
from megarl.types import PhaseBalance
from megarl.types.sampling import Sampling

_TAIL_FROM = 0.9  # of a round's samples: from then on it is the tail


class SamplingPhase:
    """A sampling phase: one phase of the open samples of groups. Each engine has one call `take_completed` open.

    The call returns before the rewards, so that slow ones do not keep work from an engine. After a failed round the
    engines must not be used again: calls are still open.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: Sequence[Worker],
        balancer: RequestBalancer,
        groups: int,
        entries: Sequence[Entry[Ref]],
        sampling: Sampling,
        history: EngineHistory,
    ) -> None:
        """groups: attention groups of each engine. entries: with open samples; the longest are sent first.

        history: of the rounds before, which gets this one.
        """
        self._cluster = cluster
        self._workers = workers
        self._balancer = balancer
        self._history = history
        self._entries = entries
        self._sampling = sampling
        self._asked = [_open_summary(entry) for entry in entries]
        self._waiting = deque(
            sorted(range(len(entries)), key=lambda index: -self._asked[index].context_tokens)
        )
        # of each group that was sent: summary, group, engine
        self._calls: dict[int, tuple[Ref, Ref, str]] = {}
        self._unscored: dict[Ref, str] = {}  # the summaries that have not come yet
        self._reports: dict[Ref, int] = {}  # the open calls, with their engines
        self._unfinished = [0] * len(workers)  # samples of each engine
        self._tokens = [[0] * groups for _ in workers]
        self._work = [EngineWork() for _ in workers]
        self._ends_s: list[float] = []  # of each sample, by the controller's clock
        self._began_s = time.monotonic()
        # of each engine, once all of its samples have finished
        self._idle_since_s = [self._began_s] * len(workers)

    def begin(self) -> None:
        """Send what engines have room for. From here on the round goes on whenever the cluster waits for any call."""
        self._send()
        self._cluster.begin_background(self)

    def result(self) -> tuple[list[Entry[Ref]], PhaseBalance]:
        """The entries in their order after their open samples have gone on, once all have."""
        self._cluster.end_background(self)
        while calls := self.labels():
            self.take(self._cluster.await_any(calls))
        sent = [self._calls[index] for index in range(len(self._entries))]
        summaries = self._cluster.gather({summary: engine for summary, _, engine in sent})
        entries = [
            replace(entry, summary=summary, ref=group)
            for entry, summary, (_, group, _) in zip(self._entries, summaries, sent, strict=True)
        ]
        return entries, self._balance()

    @property
    def sampled_s(self) -> float:
        """Seconds until the last of the samples had finished."""
        if self._ends_s:
            return self._ends_s[-1] - self._began_s
        return 0.0

    def labels(self) -> dict[Ref, str]:
        """The open calls with their engines' names: for what engines finish next, and for summaries, after rewards."""
        return {
            **self._unscored,
            **{ref: self._workers[engine].name for ref, engine in self._reports.items()},
        }

    def take(self, ended: Sequence[Ref]) -> None:
        """Count what has finished, and send what there is room for then."""
        now_s = time.monotonic()
        labels = self.labels()
        for ref in ended:
            self._unscored.pop(ref, None)
        reports = {ref: labels[ref] for ref in ended if ref in self._reports}
        for ref, finished in zip(reports, self._cluster.gather(reports), strict=True):
            engine = self._reports.pop(ref)
            for sample in finished:
                self._take(engine, sample, now_s)
            self._listen(engine)
        self._send()

    def _send(self) -> None:
        """Send the groups that engines have room for."""
        while self._waiting:
            index = self._waiting[0]
            entry = self._entries[index]
            samples = self._asked[index].num_open
            engine = self._balancer.assign(self._asked[index].context_tokens, samples)
            if engine is None:
                return
            self._waiting.popleft()
            worker = self._workers[engine]
            sampling = replace(self._sampling, stream=entry.stream)
            summary, group = worker.call_many(2, "sample", entry.prompt, sampling, entry.ref)
            self._calls[index] = (summary, group, worker.name)
            self._unscored[summary] = worker.name
            self._unfinished[engine] += samples
            self._listen(engine)

    def _listen(self, engine: int) -> None:
        """Ask the engine for what it finishes next, if it is not asked already."""
        if self._unfinished[engine] and engine not in self._reports.values():
            self._reports[self._workers[engine].call("take_completed")] = engine

    def _take(self, engine: int, sample: CompletedSample, now_s: float) -> None:
        self._balancer.finish(engine, sample.prompt_tokens, sample.response_tokens)
        self._unfinished[engine] -= 1
        self._tokens[engine][sample.group] += sample.prompt_tokens + sample.response_tokens
        self._work[engine] = self._work[engine].with_sample(
            sample.prompt_tokens, sample.response_tokens
        )
        self._ends_s.append(now_s)
        self._idle_since_s[engine] = now_s

    def _balance(self) -> PhaseBalance:
        """Once a round: the history gets its work."""
        end_s = self._ends_s[-1]
        tail_s = end_s - self._ends_s[math.ceil(_TAIL_FROM * len(self._ends_s)) - 1]
        idle_s = fmean(end_s - since_s for since_s in self._idle_since_s)
        fit = self._history.fitted()
        if fit:
            expected_s = max(seconds_of(fit, work) for work in self._work)
        else:
            expected_s = 0.0
        for work, since_s in zip(self._work, self._idle_since_s, strict=True):
            self._history.add(work, since_s - self._began_s)
        tokens = tuple(tokens for groups in self._tokens for tokens in groups)
        return PhaseBalance(tokens, tail_s, idle_s, self.sampled_s, fit, expected_s)


def _open_summary(entry: Entry[Ref]) -> PartialSummary:
    assert isinstance(entry.summary, PartialSummary), "a complete group has nothing to sample"
    return entry.summary
