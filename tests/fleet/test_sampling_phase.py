"""A round of sampling with engines and Ray stood in for: what is sent when, in which order it returns, its balance."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.fleet import sampling_phase
from megarl.fleet.sampling_phase import SamplingPhase
from megarl.fleet.step_fit import EngineHistory
from megarl.recovery.engine_processes import EngineProcess
from megarl.rollout.load_balancing import Capacity, CompletedSample, RequestBalancer
from megarl.samples.buffer import PartialSummary, RolloutBuffer
from megarl.types import Prompt
from megarl.types.sampling import Sampling


class Cluster:
    """Engines that finish one sample in each call of `await_any`, engine 0's first, and score at the end."""

    def __init__(self, engines: int) -> None:
        self.engines = [
            EngineProcess(index, index, False, self._worker(index), state="ready")
            for index in range(engines)
        ]
        self.lost: list[tuple[int, str]] = []
        # prompt and its tokens, a sample each
        self.running: list[list[tuple[str, int]]] = [[] for _ in range(engines)]
        self.sent: list[tuple[int, str, tuple[int, ...]]] = []
        self.most, self.now = 0, 0.0
        self.background: SamplingPhase | None = None

    # what the phase asks of `EngineProcesses`

    def labels(self) -> dict[Any, str]:
        return {}

    def take(self, ended: Any) -> None: ...

    def lose(self, engine: EngineProcess, worker: Any, cause: Exception) -> None:
        if engine.worker is worker and engine.state == "ready":
            self.lost.append((engine.index, str(cause)))
            engine.state = "lost"

    # what it asks of `Cluster`

    def begin_background(self, work: SamplingPhase) -> None:
        self.background = work

    def end_background(self, work: SamplingPhase) -> None:
        self.background = None

    def _worker(self, index: int) -> Any:
        def call_many(
            count: int, method: str, prompt: Prompt, sampling: Sampling, begun: Any
        ) -> tuple[Any, str]:
            self.sent.append((index, prompt.id, sampling.stream))
            samples, tokens = sampling.group_size, len(prompt.token_ids)
            if begun:
                samples, tokens = begun
            self.running[index] += [(prompt.id, tokens)] * samples
            self.most = max(self.most, len(self.running[index]))
            return ("summary", prompt.id), f"group {prompt.id}"

        def call(method: str) -> tuple[str, int, object]:
            return method, index, object()

        return SimpleNamespace(name=f"engine {index}", call=call, call_many=call_many)

    def await_any(self, labels: dict[Any, str], *, may_lose: bool = False) -> list[Any]:
        self.now += 1.0
        reports = [ref for ref in labels if ref[0] == "take_completed"]
        return [min(reports, key=lambda ref: ref[1])] if reports else [*labels]

    def gather(self, labels: dict[Any, str]) -> list[Any]:
        return [
            self._finished(ref[1]) if ref[0] == "take_completed" else f"summary {ref[1]}"
            for ref in labels
        ]

    def losses(self, labels: dict[Any, str]) -> dict[Any, Exception]:
        return {}

    def outcomes(self, labels: dict[Any, str]) -> list[Any]:
        return self.gather(labels)

    def _finished(self, engine: int) -> list[CompletedSample]:
        _, tokens = self.running[engine].pop(0)
        return [CompletedSample(0, tokens, 100)]


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(index), "", (1,) * length, "") for index, length in enumerate(lengths)]


def round_of(
    cluster: Any,
    capacity: Capacity,
    buffer: RolloutBuffer[Any],
    samples: int,
    history: EngineHistory | None = None,
) -> SamplingPhase:
    for engine in cluster.engines:
        engine.capacity = capacity
    return SamplingPhase(
        cluster,
        cluster,
        cluster.engines,
        RequestBalancer([None] * len(cluster.engines), 400),
        1,
        buffer.entries,
        Sampling(samples, 400, with_baseline=True),
        history or EngineHistory(),
    )


class Played:
    """A phase of a buffer's groups on two engines."""

    def __init__(
        self,
        capacity: Capacity,
        buffer: RolloutBuffer[Any],
        samples: int = 2,
        history: EngineHistory | None = None,
    ) -> None:
        self.cluster = cluster = Cluster(2)
        phase = round_of(cluster, capacity, buffer, samples, history)
        phase.begin()
        self.entries, self.balance = phase.result()
        assert cluster.background is None


def played(capacity: Capacity, *lengths: int, samples: int = 2) -> Played:
    return Played(
        capacity, RolloutBuffer[Any]().admitted(prompts(*lengths), (7, 3), samples + 1), samples
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are calls of `await_any`."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(
        sampling_phase, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)))
    )


def test_groups_come_back_in_order_with_streams_of_their_own() -> None:
    """Whatever is sent first: the longest prompts are."""
    outcome = played(Capacity(100, 10**6), 5, 50, 20, 40)
    assert [entry.summary for entry in outcome.entries] == [
        f"summary {index}" for index in range(4)
    ]
    assert [entry.ref for entry in outcome.entries] == [f"group {index}" for index in range(4)]
    assert [(engine, name) for engine, name, _ in outcome.cluster.sent] == [
        (0, "1"),
        (1, "3"),
        (1, "2"),
        (0, "0"),
    ]
    assert all(stream == (7, 3, int(name)) for _, name, stream in outcome.cluster.sent)


def test_a_group_goes_on_by_its_reference_the_longest_first_on_any_engine() -> None:
    buffer = RolloutBuffer[Any]().admitted(prompts(50, 5, 20), (7, 3), 3)
    begun = {1: (1, 105), 2: (2, 70)}  # open samples, and the tokens of each
    new = [
        replace(buffer.entries[place], summary=PartialSummary(*progress), ref=progress)
        for place, progress in begun.items()
    ]
    outcome = Played(Capacity(100, 10**6), buffer.updated(new))
    assert [(engine, name) for engine, name, _ in outcome.cluster.sent] == [
        (0, "1"),
        (1, "2"),
        (0, "0"),
    ]
    assert outcome.balance.group_tokens == (105 + 100 + 3 * (50 + 100), 2 * (70 + 100))


def test_what_does_not_fit_waits_for_the_engine_that_is_ahead() -> None:
    """Room for three sequences, one group of two samples and a baseline; the stand-in finishes engine 0's first."""
    outcome = played(Capacity(3, 10**6), *[10] * 6)
    assert outcome.cluster.most == 5, "the next group begins to run in the first slot that is free"
    assert [engine for engine, _, _ in outcome.cluster.sent] == [0, 1, 0, 0, 0, 0]
    assert outcome.balance.group_tokens == (5 * 3 * 110, 3 * 110)


def test_the_tail_is_from_nine_tenths_of_the_samples_on() -> None:
    outcome = played(Capacity(100, 10**6), *[10] * 10, samples=1)
    assert outcome.balance.tail_s == 20 - 18, "20 samples, one a second"
    assert outcome.balance.idle_s == 10 / 2, "the first engine finishes its ten first"


def test_a_round_is_expected_to_take_what_those_before_took() -> None:
    """The stand-in's engines take turns: of ten samples the first engine takes five seconds, the other ten."""
    history = EngineHistory()
    buffer = RolloutBuffer[Any]().admitted(prompts(*[10] * 10), (7, 3), 2)
    *before, last = (Played(Capacity(100, 10**6), buffer, 1, history).balance for _ in range(3))
    assert [(balance.fit, balance.seconds) for balance in before] == [(None, 20)] * 2
    assert last.fit and 10 <= last.expected_s <= 20


class Training(Cluster):
    """While a call of training is waited for, samples finish, and the call ends; no verdict comes until `scores`."""

    def __init__(self) -> None:
        super().__init__(2)
        self.scores = False
        self.seen: list[str] = []

    def await_any(self, labels: dict[Any, str], *, may_lose: bool = False) -> list[Any]:
        if self.background:
            before, self.background = self.background, None
            open_calls: Any = before.labels
            while reports := [ref for ref in open_calls() if ref[0] == "take_completed"]:
                before.take(reports[:1])
                self.seen.append("samples finished")
            self.background = before
            return [*labels]
        assert self.scores or not all(ref[0] == "summary" for ref in labels), "waits for a verdict"
        return super().await_any(labels)


def test_in_the_background_a_round_goes_on_while_training_is_waited_for_and_reward_results_outlast_it() -> (
    None
):
    """More groups than the engines have room for: what has waited is sent meanwhile."""
    cluster = Training()
    buffer = RolloutBuffer[Any]().admitted(prompts(*[10] * 6), (7, 3), 3)
    phase = round_of(cluster, Capacity(3, 10**6), buffer, 2)
    phase.begin()
    sent = len(cluster.sent)
    assert cluster.await_any({"update": "training rank 0"}) == ["update"]
    assert sent < len(cluster.sent) == 6 and len(cluster.seen) == 18
    assert {*phase.labels()} == {("summary", str(index)) for index in range(6)}, (
        "the verdicts alone are waited for"
    )
    sampled_s, cluster.scores = phase.sampled_s, True
    entries, _ = phase.result()
    assert [entry.ref for entry in entries] == [f"group {index}" for index in range(6)]
    assert cluster.background is None
    assert phase.sampled_s == sampled_s > 0, "verdicts are no time of engines"


class Failing(Cluster):
    """Engine 1 is lost in its second call of `await_any` that hears of it, and ready again after `away` calls more."""

    def __init__(self, away: int) -> None:
        super().__init__(2)
        self.away = away
        self.dead: Any = None
        self.calls = 0

    def await_any(self, labels: dict[Any, str], *, may_lose: bool = False) -> list[Any]:
        assert may_lose
        self.calls += 1
        engine = self.engines[1]
        if self.calls == 3:
            self.dead = engine.worker
            self.running[1].clear()
            return [ref for ref, name in labels.items() if name == engine.worker.name]
        if engine.state == "lost" and self.calls >= 3 + self.away:
            engine.worker = self._worker(1)
            engine.state = "ready"
        return super().await_any(labels, may_lose=may_lose)

    def losses(self, labels: dict[Any, str]) -> dict[Any, Exception]:
        if self.calls == 3:
            return dict.fromkeys(labels, RuntimeError("engine 1: its process died"))
        return {}

    def outcomes(self, labels: dict[Any, str]) -> list[Any]:
        if self.calls == 3:
            return [RuntimeError("engine 1: its process died")] * len(labels)
        return super().outcomes(labels)


@pytest.mark.parametrize("away", [2, 10**6])
def test_the_groups_of_an_engine_that_is_lost_go_to_the_others_and_to_it_once_it_is_back(
    away: int,
) -> None:
    """Each group is returned once, from where it was sent last, and sampled with the same random numbers."""
    cluster = Failing(away)
    buffer = RolloutBuffer[Any]().admitted(prompts(*range(40, 10, -3)), (7, 3), 3)
    phase = round_of(cluster, Capacity(3, 10**6), buffer, 2)
    phase.begin()
    entries, balance = phase.result()
    assert cluster.lost == [(1, "engine 1: its process died")]
    assert [entry.ref for entry in entries] == [f"group {index}" for index in range(10)]
    sent = [name for _, name, _ in cluster.sent]
    assert {*sent} == {str(index) for index in range(10)}
    repeated = {name for name in sent if sent.count(name) == 2}
    assert repeated == {"1"}, "what the engine had been sent"
    assert all(stream == (7, 3, int(name)) for _, name, stream in cluster.sent)
    engines_after = {engine for engine, _, _ in cluster.sent[sent.index("1") + 1 :]}
    assert engines_after == ({0, 1} if away == 2 else {0})
    assert sum(balance.group_tokens) >= sum(3 * (length + 100) for length in range(40, 10, -3))
