"""One sampling phase: groups go to the engines as these have room, and samples are counted as they finish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.fleet.step_fit import EngineHistory, EngineWork, seconds_of
from megarl.rollout.load_balancing import CompletedSample, RequestBalancer
from megarl.samples.buffer import Entry, PartialSummary
from megarl.types import PhaseBalance
from megarl.types.sampling import Sampling

_TAIL_FROM = 0.9  # of a round's samples: from then on it is the tail


@dataclass(eq=False)
class _EngineInPhase:
    """An engine in a phase. tokens: by attention group; idle_since_s: once all of its samples have finished."""

    index: int
    worker: Worker
    idle_since_s: float
    tokens: list[int]
    work: EngineWork = EngineWork()
    num_unfinished: int = 0  # samples


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
        self._reports: dict[Ref, _EngineInPhase] = {}  # the open calls, with their engines
        self._ends_s: list[float] = []  # of each sample, by the controller's clock
        self._began_s = time.monotonic()
        self._engines = [
            _EngineInPhase(index, worker, self._began_s, [0] * groups)
            for index, worker in enumerate(workers)
        ]

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
            **{ref: engine.worker.name for ref, engine in self._reports.items()},
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
            number = self._waiting[0]
            entry = self._entries[number]
            asked = self._asked[number]
            index = self._balancer.assign(asked.context_tokens, asked.num_open)
            if index is None:
                return
            self._waiting.popleft()
            engine = self._engines[index]
            sampling = replace(self._sampling, stream=entry.stream)
            summary, group = engine.worker.call_many(2, "sample", entry.prompt, sampling, entry.ref)
            self._calls[number] = (summary, group, engine.worker.name)
            self._unscored[summary] = engine.worker.name
            engine.num_unfinished += asked.num_open
            self._listen(engine)

    def _listen(self, engine: _EngineInPhase) -> None:
        """Ask the engine for what it finishes next, if it is not asked already."""
        if engine.num_unfinished and engine not in self._reports.values():
            self._reports[engine.worker.call("take_completed")] = engine

    def _take(self, engine: _EngineInPhase, sample: CompletedSample, now_s: float) -> None:
        self._balancer.finish(engine.index, sample.prompt_tokens, sample.response_tokens)
        engine.num_unfinished -= 1
        engine.tokens[sample.group] += sample.prompt_tokens + sample.response_tokens
        engine.work = engine.work.with_sample(sample.prompt_tokens, sample.response_tokens)
        engine.idle_since_s = now_s
        self._ends_s.append(now_s)

    def _balance(self) -> PhaseBalance:
        """Once a round: the history gets its work."""
        end_s = self._ends_s[-1]
        tail_s = end_s - self._ends_s[math.ceil(_TAIL_FROM * len(self._ends_s)) - 1]
        idle_s = fmean(end_s - engine.idle_since_s for engine in self._engines)
        fit = self._history.fitted()
        expected_s = 0.0
        if fit:
            expected_s = max(seconds_of(fit, engine.work) for engine in self._engines)
        for engine in self._engines:
            self._history.add(engine.work, engine.idle_since_s - self._began_s)
        tokens = tuple(chain.from_iterable(engine.tokens for engine in self._engines))
        return PhaseBalance(tokens, tail_s, idle_s, self.sampled_s, fit, expected_s)


def _open_summary(entry: Entry[Ref]) -> PartialSummary:
    assert isinstance(entry.summary, PartialSummary), "a complete group has nothing to sample"
    return entry.summary
