"""The learning rate over a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import TrainConfig
from megarl.controller.learning_rate import learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    train = TrainConfig.model_validate({"lr": 2.0, **keys})
    return [learning_rate(train, step, steps) for step in range(1, steps + 1)]


def test_schedules() -> None:
    assert rates(4) == [2.0] * 4
    assert rates(4, warmup_steps=2) == [1.0, 2.0, 2.0, 2.0]
    assert rates(4, lr_schedule="linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates(5, warmup_steps=1, lr_schedule="linear", lr_end=0.5) == [2.0, 2.0, 1.75, 1.5, 1.25]
    assert rates(5, warmup_steps=1, lr_schedule="cosine") == pytest.approx(
        [2.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )
    assert rates(2, warmup_steps=5, lr_schedule="cosine") == pytest.approx([0.4, 0.8]), (
        "the run ends in its warm-up"
    )


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
)
def test_it_rises_and_then_never_does(steps: int, warmup: int, kind: str, end: float) -> None:
    lrs = rates(steps, warmup_steps=warmup, lr_schedule=kind, lr_end=end)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in lrs)
    top = min(warmup, steps)
    assert lrs[:top] == sorted(lrs[:top])
    assert lrs[top:] == sorted(lrs[top:], reverse=True)
