"""A round of sampling with engines and Ray stood in for: what is sent when, in which order it returns, its balance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.fleet import sampling_round
from megarl.fleet.sampling_round import SamplingRound
from megarl.rollout.dealing import Capacity, CompletedSample, Dealer
from megarl.rollout.episodes import Sampling
from megarl.types import Prompt


class Cluster:
    """Engines that finish one sample in each call of `await_any`, engine 0's first, and score at the end."""

    def __init__(self, engines: int) -> None:
        self.workers: Any = [self._worker(index) for index in range(engines)]
        self.running: list[list[tuple[str, int]]] = [[] for _ in range(engines)]  # prompt and its tokens, a sample each
        self.sent: list[tuple[int, str, tuple[int, ...]]] = []
        self.most, self.now = 0, 0.0

    def _worker(self, index: int) -> Any:
        def call_many(count: int, method: str, prompt: Prompt, sampling: Sampling) -> tuple[Any, str]:
            self.sent.append((index, prompt.id, sampling.stream))
            samples = sampling.num_samples + sampling.with_baseline
            self.running[index] += [(prompt.id, len(prompt.token_ids))] * samples
            self.most = max(self.most, len(self.running[index]))
            return ("summary", prompt.id), f"group {prompt.id}"

        def call(method: str) -> tuple[str, int, object]:
            return method, index, object()

        return SimpleNamespace(name=f"engine {index}", call=call, call_many=call_many)

    def await_any(self, labels: dict[Any, str]) -> list[Any]:
        self.now += 1.0
        return [min((ref for ref in labels if ref[0] == "take_completed"), key=lambda ref: ref[1])]

    def gather(self, labels: dict[Any, str]) -> list[Any]:
        return [self._finished(ref[1]) if ref[0] == "take_completed" else f"summary {ref[1]}" for ref in labels]

    def _finished(self, engine: int) -> list[CompletedSample]:
        _, tokens = self.running[engine].pop(0)
        return [CompletedSample(0, tokens, 100)]


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(index), "", (1,) * length, "") for index, length in enumerate(lengths)]


def played(capacity: Capacity, *lengths: int, engines: int = 2, samples: int = 2) -> tuple[Cluster, Any]:
    cluster = Cluster(engines)
    one: Any = SamplingRound(cluster, cluster.workers, Dealer([capacity] * engines, 400), 1)  # type: ignore[arg-type]
    return cluster, one.sample(prompts(*lengths), Sampling(samples, 400, stream=(7, 3), with_baseline=True))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are calls of `await_any`."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(sampling_round, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


def test_groups_come_back_in_order_with_streams_of_their_own() -> None:
    """Whatever is sent first: the longest prompts are."""
    cluster, found = played(Capacity(100, 10**6), 5, 50, 20, 40)
    assert found.summaries == [f"summary {index}" for index in range(4)]
    assert found.refs == [f"group {index}" for index in range(4)]
    assert [(engine, name) for engine, name, _ in cluster.sent] == [(0, "1"), (1, "3"), (1, "2"), (0, "0")]
    assert all(stream == (7, 3, int(name)) for _, name, stream in cluster.sent)


def test_what_does_not_fit_waits_for_the_engine_that_is_ahead() -> None:
    """Room for three sequences, one group of two samples and a baseline; the stand-in finishes engine 0's first."""
    cluster, found = played(Capacity(3, 10**6), *[10] * 6)
    assert cluster.most == 5, "the next group begins to run in the first slot that is free"
    assert [engine for engine, _, _ in cluster.sent] == [0, 1, 0, 0, 0, 0]
    assert found.balance.group_tokens == (5 * 3 * 110, 3 * 110)


def test_the_tail_is_from_nine_tenths_of_the_samples_on() -> None:
    _, found = played(Capacity(100, 10**6), *[10] * 10, samples=1)
    assert found.balance.tail_s == 20 - 18, "20 samples, one a second"


def test_a_round_without_prompts_is_empty() -> None:
    _, found = played(Capacity(3, 10**6))
    assert (found.summaries, found.refs, found.balance) == ([], [], None)
