"""The phases hand the memory on in order: the giver first, then the taker."""

from __future__ import annotations

import pytest

from megarl.memory import EngineMemory, Lender, TrainerMemory


class Recorder(TrainerMemory, EngineMemory):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")

    def release_memory(self) -> None:
        self.calls.append("release_memory")

    def resume_weights(self) -> None:
        self.calls.append("resume_weights")

    def resume_cache(self) -> None:
        self.calls.append("resume_cache")


def test_a_step_gives_before_it_takes():
    both = Recorder()
    lender = Lender(both, both)
    for phase in ("rollout", "train", "train", "reshard", "rollout"):
        lender.lend(phase)
    assert both.calls == ["release_memory", "onload", "offload", "resume_weights", "resume_cache"]


@pytest.mark.parametrize(("path", "wrong"), [([], "reshard"), (["train"], "rollout")])
def test_a_phase_out_of_order_is_refused(path, wrong):
    lender = Lender(Recorder(), Recorder())
    for phase in path:
        lender.lend(phase)
    with pytest.raises(RuntimeError, match=f"to {wrong}"):
        lender.lend(wrong)
