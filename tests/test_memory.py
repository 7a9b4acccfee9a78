"""The phases hand the memory on in order: the giver first, then the taker."""

from __future__ import annotations

import pytest

from megarl.memory import Lender


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        return lambda: self.calls.append(name)


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
