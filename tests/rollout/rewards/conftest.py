"""A machine where bubblewrap works, or a skip that says why not."""

from __future__ import annotations

import pytest

from megarl.rollout.rewards.sandbox import sandbox_faults


@pytest.fixture
def isolation() -> None:
    for fault in sandbox_faults():
        pytest.skip(str(fault))
