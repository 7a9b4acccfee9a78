"""One sampling phase: groups go to the engines as these have room, and samples are counted as they finish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.fleet.step_fit import EngineHistory, EngineWork, seconds_of
from megarl.recovery.engine_processes import EngineProcess, EngineProcesses
from megarl.rollout.load_balancing import CompletedSample, RequestBalancer
from megarl.samples.buffer import Entry, PartialSummary
from megarl.types import PhaseBalance
from megarl.types.sampling import Sampling

_TAIL_FROM = 0.9  # of a round's samples: from then on it is the tail


@dataclass(frozen=True)
class _Sent:
    """A group that an engine was sent: references to its summary and to the group itself."""

    summary: Ref
    group: Ref
    engine: _EngineInPhase


@dataclass(eq=False)
class _EngineInPhase:
    """An engine in a phase. tokens: by attention group; idle_since_s: once all of its samples have finished."""

    receiver: int  # of the balancer
    process: EngineProcess
    worker: Worker
    began_s: float
    idle_since_s: float
    tokens: list[int]
    work: EngineWork = EngineWork()
    num_unfinished: int = 0  # samples


class SamplingPhase:
    """A sampling phase: one phase of the open samples of groups. Each engine has one call `take_completed` open.

    The call returns before the rewards, so that slow ones do not keep work from an engine. The groups of an engine that
    is lost wait again, as they were before the phase; an engine that is ready again gets groups as the others do. After
    a failed round the engines must not be used again: calls are still open.
    """

    def __init__(
        self,
        cluster: Cluster,
        processes: EngineProcesses,
        engines: Sequence[EngineProcess],
        balancer: RequestBalancer,
        groups: int,
        entries: Sequence[Entry[Ref]],
        sampling: Sampling,
        history: EngineHistory,
    ) -> None:
        """engines: those of `processes` that take part. balancer: of as many receivers. groups: attention groups of
        each engine. entries: with open samples; the longest are sent first.

        history: of the rounds before, which gets this one.
        """
        self._cluster = cluster
        self._processes = processes
        self._members = engines
        self._balancer = balancer
        self._groups = groups
        self._history = history
        self._entries = entries
        self._sampling = sampling
        self._asked = [_open_summary(entry) for entry in entries]
        self._waiting: deque[int] = deque()
        self._wait(range(len(entries)))
        self._sent: dict[int, _Sent] = {}
        # by the summaries that have not come yet
        self._unscored: dict[Ref, int] = {}
        self._reports: dict[Ref, _EngineInPhase] = {}  # the open calls, with their engines
        self._ends_s: list[float] = []  # of each sample, by the controller's clock
        self._began_s = time.monotonic()
        # whether somebody has asked for the result, and whether he has it
        self.is_asked = False
        self.is_over = False
        # by receiver; an engine that has come back replaces what it was
        self._engines: dict[int, _EngineInPhase] = {}
        self._lost: list[_EngineInPhase] = []

    def begin(self) -> None:
        """Send what engines have room for. From here on the round goes on whenever the cluster waits for any call."""
        for receiver in range(len(self._members)):
            self._balancer.leave(receiver)
        self._processes.take([])
        self._join(self._began_s)
        self._send()
        self._cluster.begin_background(self)

    def result(self) -> tuple[list[Entry[Ref]], PhaseBalance]:
        """The entries in their order after their open samples have gone on, once all have."""
        self.is_asked = True
        self._cluster.end_background(self)
        while self._waiting or self._unscored or self._reports:
            self.take(self._cluster.await_any(self.labels(), may_lose=True))
        sent = [self._sent[index] for index in range(len(self._entries))]
        summaries = self._cluster.gather({call.summary: call.engine.worker.name for call in sent})
        entries = [
            replace(entry, summary=summary, ref=call.group)
            for entry, summary, call in zip(self._entries, summaries, sent, strict=True)
        ]
        self.is_over = True
        return entries, self._balance()

    @property
    def sampled_s(self) -> float:
        """Seconds until the last of the samples had finished."""
        if self._ends_s:
            return self._ends_s[-1] - self._began_s
        return 0.0

    def labels(self) -> dict[Ref, str]:
        """The open calls with their engines' names.

        For what engines finish next, for summaries, after rewards, and of engines that are started anew.
        """
        return {
            **{
                ref: self._sent[number].engine.worker.name for ref, number in self._unscored.items()
            },
            **{ref: engine.worker.name for ref, engine in self._reports.items()},
            **self._processes.labels(),
        }

    def take(self, ended: Sequence[Ref]) -> None:
        """Count what has finished, and send what there is room for then."""
        now_s = time.monotonic()
        self._take_summaries(ended)
        self._take_reports(ended, now_s)
        self._processes.take(ended)
        for engine in [*self._engines.values()]:
            self._drop_if_lost(engine)
        self._join(now_s)
        self._send()

    def _take_summaries(self, ended: Sequence[Ref]) -> None:
        calls = {ref: self._sent[self._unscored[ref]] for ref in ended if ref in self._unscored}
        losses = self._cluster.losses({ref: call.engine.worker.name for ref, call in calls.items()})
        # first what has come: it is kept, also of an engine that is lost
        for ref in calls.keys() - losses.keys():
            del self._unscored[ref]
        for ref, cause in losses.items():
            self._lose(calls[ref].engine, cause)

    def _take_reports(self, ended: Sequence[Ref], now_s: float) -> None:
        calls = {ref: self._reports[ref] for ref in ended if ref in self._reports}
        names = {ref: engine.worker.name for ref, engine in calls.items()}
        for (ref, engine), finished in zip(
            calls.items(), self._cluster.outcomes(names), strict=True
        ):
            self._reports.pop(ref, None)
            if isinstance(finished, Exception):
                self._lose(engine, finished)
                continue
            for sample in finished:
                self._take(engine, sample, now_s)
            self._listen(engine)

    def _lose(self, engine: _EngineInPhase, cause: Exception) -> None:
        self._processes.lose(engine.process, engine.worker, cause)
        if engine in self._engines.values():
            self._drop_if_lost(engine)

    def _drop_if_lost(self, engine: _EngineInPhase) -> None:
        """Have the groups wait again that an engine was sent and has not completed, if it is ready no longer."""
        if engine.process.state == "ready" and engine.process.worker is engine.worker:
            return
        del self._engines[engine.receiver]
        self._lost.append(engine)
        self._balancer.leave(engine.receiver)
        self._reports = {ref: other for ref, other in self._reports.items() if other is not engine}
        left = {
            ref: number
            for ref, number in self._unscored.items()
            if self._sent[number].engine is engine
        }
        for ref, number in left.items():
            del self._unscored[ref]
            del self._sent[number]
        self._wait(left.values())

    def _wait(self, numbers: Iterable[int]) -> None:
        """Put groups into the queue, in which the longest are first."""
        waiting = [*self._waiting, *numbers]
        waiting.sort(key=lambda number: (-self._asked[number].context_tokens, number))
        self._waiting = deque(waiting)

    def _join(self, now_s: float) -> None:
        """Take in the engines that are ready and were not yet, or are again."""
        for receiver, process in enumerate(self._members):
            if process.state != "ready" or receiver in self._engines:
                continue
            assert process.capacity
            self._engines[receiver] = _EngineInPhase(
                receiver, process, process.worker, now_s, now_s, [0] * self._groups
            )
            self._balancer.join(receiver, process.capacity)

    def _send(self) -> None:
        """Send the groups that engines have room for."""
        while self._waiting:
            number = self._waiting[0]
            entry = self._entries[number]
            asked = self._asked[number]
            receiver = self._balancer.assign(asked.context_tokens, asked.num_open)
            if receiver is None:
                return
            self._waiting.popleft()
            engine = self._engines[receiver]
            sampling = replace(self._sampling, stream=entry.stream)
            summary, group = engine.worker.call_many(2, "sample", entry.prompt, sampling, entry.ref)
            self._sent[number] = _Sent(summary, group, engine)
            self._unscored[summary] = number
            engine.num_unfinished += asked.num_open
            self._listen(engine)

    def _listen(self, engine: _EngineInPhase) -> None:
        """Ask the engine for what it finishes next, if it is not asked already."""
        if engine.num_unfinished and engine not in self._reports.values():
            self._reports[engine.worker.call("take_completed")] = engine

    def _take(self, engine: _EngineInPhase, sample: CompletedSample, now_s: float) -> None:
        self._balancer.finish(engine.receiver, sample.prompt_tokens, sample.response_tokens)
        engine.num_unfinished -= 1
        engine.tokens[sample.group] += sample.prompt_tokens + sample.response_tokens
        engine.work = engine.work.with_sample(sample.prompt_tokens, sample.response_tokens)
        engine.idle_since_s = now_s
        self._ends_s.append(now_s)

    def _balance(self) -> PhaseBalance:
        """Once a round: the history gets its work."""
        end_s = self._ends_s[-1]
        tail_s = end_s - self._ends_s[math.ceil(_TAIL_FROM * len(self._ends_s)) - 1]
        engines = [*self._engines.values()]
        idle_s = fmean(end_s - engine.idle_since_s for engine in engines or self._lost)
        fit = self._history.fitted()
        expected_s = 0.0
        if fit:
            expected_s = max(seconds_of(fit, engine.work) for engine in engines or self._lost)
        for engine in engines:
            self._history.add(engine.work, engine.idle_since_s - engine.began_s)
        tokens = chain.from_iterable(engine.tokens for engine in engines + self._lost)
        return PhaseBalance(tuple(tokens), tail_s, idle_s, self.sampled_s, fit, expected_s)


def _open_summary(entry: Entry[Ref]) -> PartialSummary:
    assert isinstance(entry.summary, PartialSummary), "a complete group has nothing to sample"
    return entry.summary
