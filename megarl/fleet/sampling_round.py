"""One round of sampling: prompts go to the engines as these have room, and samples are counted as they finish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.session import Cluster
from megarl.fleet.rank_groups import RolloutBatch
from megarl.rollout.dealing import CompletedSample, Dealer
from megarl.rollout.episodes import Sampling
from megarl.types import Prompt, RoundBalance

_TAIL_FROM = 0.9  # of a round's samples: from then on it is the tail


class SamplingRound:
    """A round of `Engines.sample`. Each engine with samples to finish has one call `take_completed` open.

    The call returns before the verdicts, so that slow ones do not keep work from an engine. After a failed round the
    engines must not be used again: calls are still open.
    """

    def __init__(self, cluster: Cluster, workers: Sequence[Worker], dealer: Dealer, groups: int) -> None:
        """groups: attention groups of each engine."""
        self._cluster, self._workers, self._dealer = cluster, workers, dealer
        self._calls: dict[int, tuple[Ref, Ref, str]] = {}  # of each prompt that was sent: summary, group, engine
        self._unscored: dict[Ref, str] = {}  # the summaries that have not come yet
        self._reports: dict[Ref, int] = {}  # the open calls, with their engines
        self._unfinished = [0] * len(workers)  # samples of each engine
        self._tokens = [[0] * groups for _ in workers]
        self._ends_s: list[float] = []  # of each sample, by the controller's clock

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> RolloutBatch:
        """One group per prompt, in the order of the prompts. The longest prompts are sent first."""
        if not prompts:
            return RolloutBatch([], [])
        waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index].token_ids)))
        while waiting or self._reports:
            self._send(waiting, prompts, sampling)
            self._await_results()
        calls = [self._calls[index] for index in range(len(prompts))]
        found = self._cluster.gather({summary: engine for summary, _, engine in calls})
        return RolloutBatch(found, [group for _, group, _ in calls], self._balance())

    def _send(self, waiting: deque[int], prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Send the prompts that engines have room for."""
        samples = sampling.num_samples + sampling.with_baseline
        while waiting:
            prompt = prompts[waiting[0]]
            engine = self._dealer.deal(len(prompt.token_ids), samples)
            if engine is None:
                return
            index, worker = waiting.popleft(), self._workers[engine]
            own = replace(sampling, stream=(*sampling.stream, index))
            summary, group = worker.call_many(2, "sample", prompt, own)
            self._calls[index], self._unscored[summary] = (summary, group, worker.name), worker.name
            self._unfinished[engine] += samples
            self._listen(engine)

    def _listen(self, engine: int) -> None:
        """Ask the engine for what it finishes next, if it is not asked already."""
        if self._unfinished[engine] and engine not in self._reports.values():
            self._reports[self._workers[engine].call("take_completed")] = engine

    def _await_results(self) -> None:
        """Wait until samples have finished, or groups were scored."""
        reports = {ref: self._workers[engine].name for ref, engine in self._reports.items()}
        ended = self._cluster.await_any({**self._unscored, **reports})
        now_s = time.monotonic()
        for ref in ended:
            self._unscored.pop(ref, None)
        come = {ref: reports[ref] for ref in ended if ref in reports}
        for ref, finished in zip(come, self._cluster.gather(come), strict=True):
            engine = self._reports.pop(ref)
            for sample in finished:
                self._take(engine, sample, now_s)
            self._listen(engine)

    def _take(self, engine: int, sample: CompletedSample, now_s: float) -> None:
        self._dealer.finish(engine, sample.prompt_tokens, sample.response_tokens)
        self._unfinished[engine] -= 1
        self._tokens[engine][sample.group] += sample.prompt_tokens + sample.response_tokens
        self._ends_s.append(now_s)

    def _balance(self) -> RoundBalance:
        tail_s = self._ends_s[-1] - self._ends_s[math.ceil(_TAIL_FROM * len(self._ends_s)) - 1]
        return RoundBalance(tuple(tokens for groups in self._tokens for tokens in groups), tail_s)
