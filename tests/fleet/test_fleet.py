"""In which order a fleet starts, and what publishing does when an exchange fails.

Exchange, engines, ranks and Ray are stood in for: each is real elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.fleet import engines, fleet
from megarl.fleet.fleet import Fleet
from megarl.fleet.step_fit import EngineHistory
from megarl.model.lora_pairs import LoraSize
from megarl.placement.engine_layout import EngineLayout
from megarl.recovery.engine_processes import EngineProcess
from megarl.resharding.member import Stats
from megarl.rollout.load_balancing import Capacity
from megarl.samples.buffer import PartialGroup, PartialSummary, RolloutBuffer
from megarl.types import Prompt, SampleGroup, SamplePart
from megarl.types.losses import Losses
from megarl.types.reward_result import RewardResult
from megarl.types.sampling import Sampling
from tests.plan import plans
from tests.samples.responses import response, with_row

STATS = Stats(1, 0, 0, 0, 0.0, 0.0)


class Cluster:
    """Fails the first `failures` exchanges; `alive`: whether every process outlives them."""

    culprit = "engine 0"  # whose call fails
    suspects: Sequence[int] | None = []  # of the members, by what these know

    def __init__(self, failures: int, alive: bool) -> None:
        self.failures, self.alive = failures, alive
        self.engines: Any = None
        self.loss_log = Losses()

    def gather(self, calls: dict[Any, str]) -> None:
        if self.failures:
            self.failures -= 1
            raise WorkerFailed(f"{self.culprit}: broken off", "traceback", self.culprit)

    def settle(self, calls: dict[Any, str]) -> bool:
        self.engines.settled()
        return self.alive


class Engines:
    """One engine; it takes the version of an exchange, or states `stuck`. `losses`: exchanges in which it is lost."""

    def __init__(self, stuck: int | None = None, losses: int = 0) -> None:
        self.stuck, self.asked, self.steps = stuck, [], []
        self.losses = losses
        self.processes = self
        worker: Any = SimpleNamespace(name="engine 0", call=self.call)
        self.engines = [EngineProcess(0, 0, True, worker, state="ready", has_session=True)]
        self.num_lost = 0
        self.firsts: list[bool] = []

    def restore(self) -> None:
        if self.engines[0].state == "lost":
            self.engines[0].state = "empty"

    def filled(self) -> None:
        self.engines[0].state = "ready"
        self.engines[0].has_session = True

    def forget_sessions(self) -> None:
        self.engines[0].has_session = False

    def settled(self) -> None:
        """While the other calls of an exchange that has failed come to their end."""
        if self.losses:
            self.losses -= 1
            self.num_lost += 1
            self.engines[0].state = "lost"
            self.engines[0].has_session = False

    def lose_named(self, cause: WorkerFailed) -> bool:
        is_engine = cause.worker == "engine 0"
        self.num_lost += is_engine
        return is_engine

    def call(self, method: str, message: dict[str, Any], version: int) -> object:
        self.asked.append((version, message["attempt"]))
        self.steps.append(message["steps"])
        return object()

    def versions(self) -> list[int]:
        return [self.asked[-1][0] if self.stuck is None else self.stuck]


def policy() -> SimpleNamespace:
    return SimpleNamespace(
        lora=None, recipe=SimpleNamespace(lora=None), model=SimpleNamespace(facts=None)
    )


def made(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, engines: Engines
) -> tuple[Fleet, list[str], list[str]]:
    """A fleet with fakes around it, the lines that it prints, and the phases that it hands the memory over to."""
    monkeypatch.setattr(fleet, "collect_stats", lambda *_: STATS)
    monkeypatch.setattr(fleet, "abandon", lambda *_: None)
    monkeypatch.setattr(fleet, "exchange_suspects", lambda *_: cluster.suspects)
    cluster.engines = engines
    bare_fleet, lines, phases = Fleet.__new__(Fleet), [], []

    def onload_for(phase: str) -> dict[str, float]:
        phases.append(phase)
        return {f"memory/before_{phase}_bytes": 1.0}

    bare_fleet.__dict__.update(
        _cluster=cluster, engines=engines, version=3, attempts=4,
        trainers=SimpleNamespace(workers=[], processes=SimpleNamespace(loss=None)),
        _num_lost=0, _experts=None,
        memory=SimpleNamespace(phase="train", onload_for=onload_for), say=lines.append, _store=None, _run_id="run",
        roles=SimpleNamespace(num_members=1, policy=policy(), engines=EngineLayout(1, 1, 1)),
        _sessions=SimpleNamespace(
            trainers={},
            engine_message=lambda index, version, attempt, first, steps, places: engines.firsts.append(first) or {
                "attempt": attempt, "steps": steps
            },
        ),
        _open_sessions=lambda: bare_fleet._sessions,
    )  # fmt: skip
    return bare_fleet, lines, phases


def test_an_exchange_that_fails_is_repeated_once_under_a_new_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines()
    bare_fleet, lines, phases = made(monkeypatch, Cluster(failures=1, alive=True), engines)
    assert bare_fleet.reshard() == (
        STATS,
        {
            "memory/before_reshard_bytes": 1.0,
            "memory/before_rollout_bytes": 1.0,
            "reshard/engines": 1,
        },
    )
    assert engines.asked == [(4, 5), (4, 6)]
    assert engines.firsts == [False, True], (
        "a connection that is broken would fail the second one, too"
    )
    assert (bare_fleet.version, bare_fleet.attempts) == (4, 6)
    assert lines == ["the reshard to version 4 failed and is repeated: engine 0: broken off"]
    assert phases == ["reshard", "rollout"]


def test_an_engine_by_which_an_exchange_fails_twice_is_lost_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be alive and reach nobody any more. Where a new one does not help, nothing would be new in a third one."""
    engines = Engines()
    bare_fleet, lines, _ = made(monkeypatch, Cluster(failures=2, alive=True), engines)
    bare_fleet.reshard()
    assert (engines.num_lost, len(lines)) == (1, 2)
    bare_fleet, lines, _ = made(monkeypatch, Cluster(failures=3, alive=True), engines)
    with pytest.raises(WorkerFailed, match="^engine 0: broken off"):
        bare_fleet.reshard()
    assert (engines.num_lost, len(lines)) == (2, 2)


def test_nobody_is_lost_where_the_inputs_of_members_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, cluster = Engines(), Cluster(failures=2, alive=True)
    cluster.suspects = None
    bare_fleet, lines, _ = made(monkeypatch, cluster, engines)
    with pytest.raises(WorkerFailed, match="^engine 0: broken off"):
        bare_fleet.reshard()
    assert (engines.num_lost, len(lines)) == (0, 1)


def test_the_engine_that_is_the_cause_is_lost_and_not_the_worker_whose_call_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, cluster = Engines(), Cluster(failures=2, alive=True)
    cluster.culprit = "training rank 1"
    cluster.suspects = [0]
    bare_fleet, lines, _ = made(monkeypatch, cluster, engines)
    bare_fleet.reshard()
    assert (engines.num_lost, len(lines)) == (1, 2)


def test_a_rank_that_is_the_cause_ends_the_reshard_for_whoever_rebuilds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, cluster = Engines(), Cluster(failures=2, alive=True)
    cluster.suspects = [1]
    bare_fleet, _, _ = made(monkeypatch, cluster, engines)
    ranks = [SimpleNamespace(name=f"training rank {rank}") for rank in range(2)]
    monkeypatch.setattr(bare_fleet.trainers, "workers", ranks)
    with pytest.raises(WorkerFailed, match=r"^training rank 1: .*engine 0: broken off") as raised:
        bare_fleet.reshard()
    assert raised.value.worker == "training rank 1" and engines.num_lost == 0


def test_losses_of_engines_are_counted_until_a_record_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by a reshard that has none, in which the run goes back to before a step."""
    engines = Engines(losses=1)
    bare_fleet, _, _ = made(monkeypatch, Cluster(failures=1, alive=True), engines)
    bare_fleet.reshard()
    bare_fleet.reshard()
    assert [bare_fleet.take_engine_losses() for _ in range(2)] == [1, 0]


def test_an_exchange_is_repeated_as_often_as_an_engine_is_lost_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine that was started anew gets the session; how often it may be lost is the matter of its restarts."""
    engines = Engines(losses=3)
    bare_fleet, lines, _ = made(monkeypatch, Cluster(failures=3, alive=True), engines)
    bare_fleet.reshard()
    assert engines.asked == [(4, 5), (4, 6), (4, 7), (4, 8)]
    assert engines.firsts == [False, True, True, True]
    assert (bare_fleet.version, len(lines)) == (4, 3)


@pytest.mark.parametrize("failures", [0, 1])
def test_what_engines_have_read_of_ranks_that_died_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Whether the exchange has failed or not: it is repeated with new ranks, by whoever brings them back."""
    engines = Engines()
    cluster = Cluster(failures=failures, alive=True)
    bare_fleet, lines, _ = made(monkeypatch, cluster, engines)
    cause = WorkerFailed("training rank 1: its process died", "traceback", "training rank 1")
    exchange = cluster.gather

    def die(calls: dict[Any, str]) -> None:
        processes: Any = bare_fleet.trainers.processes
        processes.loss = SimpleNamespace(cause=cause)
        exchange(calls)

    cluster.gather = die  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match="training rank 1"):
        bare_fleet.reshard()
    assert (bare_fleet.version, len(engines.asked), lines) == (3, 1, [])


def test_engines_get_the_frozen_weights_until_they_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines()
    bare_fleet, _, _ = made(monkeypatch, Cluster(failures=1, alive=True), engines)
    engines.engines[0].has_session = False
    of_policy: Any = bare_fleet.roles.policy
    of_policy.lora = LoraSize(2, 2, 4.0, (), sync="adapters")
    bare_fleet.reshard()
    bare_fleet.reshard()
    assert engines.steps == [["weights", "factors"], ["weights", "factors"], ["factors"]]
    of_policy.lora = LoraSize(2, 2, 4.0, ())
    bare_fleet.reshard()
    assert engines.steps[-1] == ["weights"]


@pytest.mark.parametrize(
    ("dtype", "of_ranks", "asked", "published"),
    [
        ("bfloat16", 0.25, [(4, 0)], 0.25),
        ("bfloat16", None, [(4, 0)], 0.75),  # the first version, of which all deltas are 0
        ("float32", 0.25, [], 0.75),
    ],
)
def test_ranks_that_compute_with_merged_weights_round_them_once_for_a_version(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    of_ranks: float | None,
    asked: list[Any],
    published: float,
) -> None:
    """Before they are sent, also where they are sent twice; elsewhere the share is what the exchange has counted."""
    engines, rounded = Engines(), []
    bare_fleet, _, _ = made(monkeypatch, Cluster(failures=1, alive=True), engines)
    monkeypatch.setattr(fleet, "collect_stats", lambda *_: replace(STATS, kept_share=0.75))

    def round_weights(version: int) -> float | None:
        rounded.append((version, len(engines.asked)))
        return of_ranks

    bare_fleet.__dict__.update(
        trainers=SimpleNamespace(
            workers=[], round_weights=round_weights, processes=SimpleNamespace(loss=None)
        )
    )
    of_policy: Any = bare_fleet.roles.policy
    of_policy.recipe = SimpleNamespace(
        lora=SimpleNamespace(sync="merged"), model=SimpleNamespace(dtype=dtype)
    )
    stats, _ = bare_fleet.reshard()
    assert (rounded, stats.kept_share, len(engines.asked)) == (asked, published, 2)


@pytest.mark.parametrize(("failures", "alive", "attempts"), [(2, True, 2), (1, False, 1)])
def test_then_the_run_ends_with_the_version_it_had(
    monkeypatch: pytest.MonkeyPatch, failures: int, alive: bool, attempts: int
) -> None:
    engines, cluster = Engines(), Cluster(failures, alive)
    cluster.culprit = "training rank 0"
    bare_fleet, _, phases = made(monkeypatch, cluster, engines)
    with pytest.raises(WorkerFailed, match="broken off"):
        bare_fleet.reshard()
    assert (bare_fleet.version, len(engines.asked)) == (3, attempts)
    assert phases == ["reshard"]  # nobody may sample


def test_a_reshard_that_is_repeated_because_a_rank_is_lost_at_its_end_has_the_same_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank does not answer when it is asked for its memory."""
    engines = Engines()
    bare_fleet, _, _ = made(monkeypatch, Cluster(0, True), engines)
    hand_over = bare_fleet.memory.onload_for

    def fail(phase: Any) -> dict[str, float]:
        if phase == "rollout":
            raise WorkerFailed("training rank 0: its process died", "traceback", "training rank 0")
        return hand_over(phase)

    with monkeypatch.context() as patch, pytest.raises(WorkerFailed):
        patch.setattr(bare_fleet.memory, "onload_for", fail)
        bare_fleet.reshard()
    bare_fleet.reshard()
    assert [version for version, _ in engines.asked] == [4, 4] and bare_fleet.version == 4


def test_an_engine_that_states_another_version_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare_fleet, _, phases = made(monkeypatch, Cluster(0, True), Engines(stuck=3))
    with pytest.raises(RuntimeError, match=r"engines are at versions \[3\], the trainer is at 4"):
        bare_fleet.reshard()
    assert (bare_fleet.version, phases) == (3, ["reshard"])


def test_all_rounds_have_one_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns from each round how long responses are."""
    balancers = []

    def sampling_phase(
        cluster: Any,
        processes: Any,
        engines: Any,
        balancer: Any,
        groups: int,
        entries: Any,
        *others: Any,
    ) -> Any:
        balancers.append(balancer)
        return SimpleNamespace(begin=lambda: None, result=lambda: (entries, groups, len(engines)))

    monkeypatch.setattr(engines, "SamplingPhase", sampling_phase)
    bare_engines: Any = engines.Engines.__new__(engines.Engines)
    worker: Any = object()
    processes = [EngineProcess(index, index, index == 0, worker) for index in range(3)]
    bare_engines.__dict__.update(
        _cluster=None, processes=SimpleNamespace(engines=processes), _balancers={}, _history=EngineHistory(),
        _recipe=SimpleNamespace(rollout=SimpleNamespace(engine=SimpleNamespace(dp=2))),
    )  # fmt: skip
    results = [bare_engines.begin([name], Sampling(4, 8)).result() for name in "ab"]
    assert results == [(["a"], 2, 3), (["b"], 2, 3)]
    assert balancers[0] is balancers[1]
    ahead = [
        bare_engines.begin([name], Sampling(4, 8), beside_training=True).result() for name in "ab"
    ]
    assert ahead == [(["a"], 2, 2), (["b"], 2, 2)], "on the engines with GPUs of their own"
    assert balancers[2] is balancers[3] is not balancers[0]


class Starts:
    """A cluster whose processes only note, in order, what is begun and waited for."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def worker(self, name: str, slot: int, on_loss: object, *, computes: bool) -> Any:
        return SimpleNamespace(
            name=name,
            start=lambda *_: self.seen.append(f"start {name}") or name,
            watch=lambda _: None,
        )

    def gather(self, calls: dict[Any, str]) -> None:
        self.seen.append(f"await {' '.join(calls.values())}")

    def call_all(self, workers: list[Any], method: str) -> list[Any]:
        return [Capacity(4, 100)] * len(workers)


@pytest.mark.parametrize(
    ("device", "first_engine_gpu", "expected"),
    [
        ("cpu", 0, ["start engine 0", "await engine 0 rank", "offload"]),
        ("cuda", 2, ["start engine 0", "await engine 0 rank", "offload"]),
        ("cuda", 0, ["await rank", "offload", "start engine 0", "await engine 0"]),
    ],
)
def test_an_engine_measures_a_shared_gpu_when_the_ranks_have_given_it_back(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    first_engine_gpu: int,
    expected: list[str],
) -> None:
    cluster: Any = Starts()
    ranks = SimpleNamespace(
        started={"rank": "rank"},
        store=None,
        offload=lambda: cluster.seen.append("offload"),
        workers=[],
    )
    monkeypatch.setattr(engines.device, "DEVICE", device)
    monkeypatch.setattr(fleet, "PolicyRanks", lambda *_: ranks)
    monkeypatch.setattr(Fleet, "_open_sessions", lambda _: None)
    placement = {"train_gpus": 2, "first_engine_gpu": first_engine_gpu} if first_engine_gpu else {}
    gpus = first_engine_gpu + 2
    recipe = plans.recipe(
        tmp_path, "tiny", gpus, ep=2, engine={"count": 1, "tp": 2, "ep": 2}, placement=placement
    )
    Fleet(cluster, recipe, lambda _: None)
    assert cluster.seen == expected


class Held:
    """A reference to a group."""

    def __init__(self, group: Any) -> None:
        self.group = group


def test_a_buffer_is_saved_and_comes_back_group_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete group, and one with an open sample whose verdict is still to come."""
    logp_T = np.array([-1.0, -2.0], np.float32)
    sample = response((1, 2, 3), np.array([5, 6]), logp_T, "ab", version=3)
    opened = with_row(sample, parts=(SamplePart(2, 1), SamplePart(3, 1)))
    opened = replace(opened, text="", finished=False, is_open=True)
    prompt = Prompt("a", "", (1, 2, 3), "")
    whole = SampleGroup(prompt, (sample,), np.ones(1, np.float32), np.ones(1, np.bool_))
    partial = PartialGroup(
        replace(prompt, id="b"), (sample, opened), (RewardResult(0.5, True), None)
    )
    buffer = RolloutBuffer[Any]().admitted([prompt, prompt], (1, 2), 2)
    pairs = zip(buffer.entries, (whole, partial), strict=True)
    buffer = buffer.updated([replace(entry, ref=Held(group)) for entry, group in pairs])
    bare_fleet: Any = Fleet.__new__(Fleet)
    ranks = SimpleNamespace(save=lambda _: None, load=lambda _: None)
    bare_fleet.__dict__.update(
        _cluster=SimpleNamespace(put=lambda group: group, gather=lambda calls: [held.group for held in calls]),
        trainers=ranks, critic=None, onload_for=lambda _: {}, attempts=0,
        roles=SimpleNamespace(policy=SimpleNamespace(shape=SimpleNamespace(vocab_size=9))),
        _recipe=SimpleNamespace(
            rollout=SimpleNamespace(temperature=0.7), run=SimpleNamespace(timeout_s=60.0),
            reward=SimpleNamespace(source="data_source"),
        ),
    )  # fmt: skip
    attended: list[Path] = []

    def while_answering(function: Any, folder: Path, *_: object) -> None:
        attended.append(folder)
        assert not [*folder.iterdir()], (
            "nothing is written that a disk which does not answer could hold"
        )
        function()

    monkeypatch.setattr(fleet, "while_answering", while_answering)
    bare_fleet.save(tmp_path, buffer)
    assert attended == [tmp_path]
    (*ids, first, first_group), (other, second, second_group) = bare_fleet.resume(tmp_path, 3, 4)
    assert [*ids, other] == ["a", "b"]
    assert (bare_fleet.version, bare_fleet.attempts) == (3, 4)
    assert first.response_lengths_G.tolist() == [2] and isinstance(first_group, SampleGroup)
    assert second == PartialSummary(1, 5)
    assert (second_group.reward_results, second_group.samples[1].only_row.parts) == (
        partial.reward_results,
        opened.only_row.parts,
    )
    bare_fleet.save(tmp_path / "empty", RolloutBuffer[Any]())
    assert bare_fleet.resume(tmp_path / "empty", 3, 4) == []
