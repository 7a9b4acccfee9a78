"""Judges that end with their test, the rewards of `odd_rewards.py`, and a machine where bubblewrap works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Reward
from megarl.rollout.rewards.judges import Judges
from megarl.rollout.rewards.sandbox import sandbox_faults

START_S = 120.0


@pytest.fixture
def odd_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def judges() -> Iterator[Callable[..., Judges]]:
    """Build judges of a recipe's keys; whatever a test does, none of their processes survives."""
    built: list[Judges] = []

    def build(function: str | None, **keys: Any) -> Judges:
        built.append(Judges(Reward(function=function, **keys), START_S))
        return built[-1]

    yield build
    for one in built:
        one.shutdown()


@pytest.fixture
def isolation() -> None:
    """Or a skip that says why not."""
    for fault in sandbox_faults():
        pytest.skip(str(fault))
