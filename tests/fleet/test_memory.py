"""The phases hand the memory on in order: the giver first, then the taker."""

from __future__ import annotations

import pytest

from megarl.fleet.memory import EngineMemory, MemoryScheduler, RanksMemory


class Recorder(RanksMemory, EngineMemory):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")

    def held_bytes(self) -> int:
        return len(self.calls)

    def release_memory(self) -> None:
        self.calls.append("release_memory")

    def resume_weights(self) -> None:
        self.calls.append("resume_weights")

    def resume_cache(self) -> None:
        self.calls.append("resume_cache")


def test_a_step_gives_before_it_takes():
    both = Recorder()
    lender = MemoryScheduler(both, both)
    for phase in ("rollout", "train", "train", "reshard", "rollout"):
        lender.hand_over(phase)
    assert both.calls == ["release_memory", "onload", "offload", "resume_weights", "resume_cache"]


def test_what_is_held_is_read_before_and_after_each_change():
    lender = MemoryScheduler(Recorder(), Recorder())
    lender.hand_over("train")
    lender.hand_over("reshard")
    assert lender.readings() == {
        "memory/before_train_bytes": 0,
        "memory/after_train_bytes": 1,
        "memory/before_reshard_bytes": 1,
        "memory/after_reshard_bytes": 2,
    }
    lender.hand_over("reshard")
    assert lender.readings() == {}, "nothing changed hands since"


@pytest.mark.parametrize(("path", "wrong"), [([], "reshard"), (["train"], "rollout")])
def test_a_phase_out_of_order_is_refused(path, wrong):
    lender = MemoryScheduler(Recorder(), Recorder())
    for phase in path:
        lender.hand_over(phase)
    with pytest.raises(RuntimeError, match=f"to {wrong}"):
        lender.hand_over(wrong)


class Named(Recorder):
    """Notes its calls in a list that it shares with others."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def offload(self) -> None:
        self.calls.append(f"{self.name} gives")

    def onload(self) -> None:
        self.calls.append(f"{self.name} takes")


def test_critic_and_reward_model_have_their_turns():
    calls: list[str] = []
    actor, critic, scorer = (Named(name, calls) for name in ("actor", "critic", "scorer"))
    lender = MemoryScheduler(actor, Named("engines", calls), critic, scorer)
    for phase in ("score", "critic", "train", "critic", "reshard", "rollout"):
        lender.hand_over(phase)
    assert calls == [
        *("release_memory", "scorer takes"),
        *("scorer gives", "critic takes"),
        *("critic gives", "actor takes"),
        *("actor gives", "critic takes"),  # to be saved
        *("critic gives", "resume_weights"),
        "resume_cache",
    ]
    assert {"memory/before_score_bytes", "memory/after_critic_bytes"} <= lender.readings().keys()


def test_who_is_not_there_cannot_take():
    with pytest.raises(RuntimeError, match="to critic"):
        MemoryScheduler(Recorder(), Recorder()).hand_over("critic")
