"""Phases hand the memory over in order: it is released first, then allocated."""

from __future__ import annotations

import pytest

from megarl.fleet.memory import EngineMemory, MemoryScheduler, RanksMemory


class Recorder(RanksMemory, EngineMemory):
    """Notes its calls, in a list that several recorders may share."""

    def __init__(self, name: str = "", calls: list[str] | None = None) -> None:
        self.name = name
        self.calls = [] if calls is None else calls

    def offload(self) -> None:
        self.calls.append(f"{self.name} offloads")

    def onload(self) -> None:
        self.calls.append(f"{self.name} onloads")

    def held_bytes(self) -> int:
        return len(self.calls)

    def release_memory(self) -> None:
        self.calls.append("release_memory")

    def resume_weights(self) -> None:
        self.calls.append("resume_weights")

    def resume_cache(self) -> None:
        self.calls.append("resume_cache")


def test_memory_is_released_before_it_is_allocated():
    recorder = Recorder("rank")
    scheduler = MemoryScheduler(recorder, recorder)
    for phase in ("rollout", "train", "train", "reshard", "rollout"):
        scheduler.onload_for(phase)
    assert recorder.calls == [
        *("release_memory", "rank onloads"),
        *("rank offloads", "resume_weights"),
        "resume_cache",
    ]


def test_what_is_held_is_read_before_and_after_each_change():
    scheduler = MemoryScheduler(Recorder(), Recorder())
    assert scheduler.onload_for("train") == {
        "memory/before_train_bytes": 0,
        "memory/after_train_bytes": 1,
    }
    assert scheduler.onload_for("reshard") == {
        "memory/before_reshard_bytes": 1,
        "memory/after_reshard_bytes": 2,
    }
    assert scheduler.onload_for("reshard") == {}, "the phase is entered already"


@pytest.mark.parametrize(
    ("path", "wrong"), [([], "reshard"), (["train"], "rollout"), ([], "critic")]
)
def test_a_phase_out_of_order_is_refused(path, wrong):
    scheduler = MemoryScheduler(Recorder(), Recorder())
    for phase in path:
        scheduler.onload_for(phase)
    with pytest.raises(RuntimeError, match=f"to {wrong}"):
        scheduler.onload_for(wrong)


def test_critic_and_reward_model_have_their_phases():
    calls: list[str] = []
    actor, critic, scorer = (Recorder(name, calls) for name in ("actor", "critic", "scorer"))
    scheduler = MemoryScheduler(actor, Recorder("engines", calls), critic, scorer)
    readings = {}
    for phase in ("score", "critic", "train", "critic", "reshard", "rollout"):
        readings |= scheduler.onload_for(phase)
    assert calls == [
        *("release_memory", "scorer onloads"),
        *("scorer offloads", "critic onloads"),
        *("critic offloads", "actor onloads"),
        *("actor offloads", "critic onloads"),  # to be saved
        *("critic offloads", "resume_weights"),
        "resume_cache",
    ]
    assert {"memory/before_score_bytes", "memory/after_critic_bytes"} <= readings.keys()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], ["release_memory"]),
        (["train"], []),
        (["train", "reshard"], ["resume_cache", "release_memory"]),
        (["train", "reshard", "rollout"], ["release_memory"]),
        (["score"], []),
    ],
)
def test_memory_is_taken_from_the_engines_for_ranks_that_are_rebuilt(path, expected):
    """Whoever computed before; then any phase of a step may follow."""
    recorder = Recorder("rank")
    scheduler = MemoryScheduler(recorder, recorder, recorder, recorder)
    for phase in path:
        scheduler.onload_for(phase)
    before = len(recorder.calls)
    scheduler.take_back()
    assert recorder.calls[before:] == expected
    for phase in ("score", "critic", "train", "reshard", "rollout"):
        scheduler.onload_for(phase)
