from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.cluster import local_ray

SLOW = Exception("The current node timed out during startup. This could happen because ...")


def _start(monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[Exception | None]) -> list[str]:
    """What is said while Ray's starts end like this, one after the other. All processes are spared."""
    left, lines = list(outcomes), list[str]()

    def init(**_: object) -> None:
        if outcome := left.pop(0):
            raise outcome

    monkeypatch.setattr(local_ray.ray, "init", init)
    monkeypatch.setattr(
        local_ray.processes,
        "kill_descendants",
        lambda spare: lines.append(f"all but {spare} ended"),
    )
    monkeypatch.setattr(local_ray.ray_environment, "use_own_token", lambda: None)
    local_ray.start_ray(4, Path("/nowhere"), lines.append, {1})
    assert left == []
    return lines


def test_a_slow_start_is_tried_again_after_its_processes_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = ["Ray has not started within its 30 s: it is started again", "all but {1} ended"]
    assert _start(monkeypatch, [None]) == []
    assert _start(monkeypatch, [SLOW, SLOW, None]) == again * 2


def test_other_failures_and_the_last_slow_start_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="port"):
        _start(monkeypatch, [ValueError("port")])
    with pytest.raises(Exception, match="timed out during startup"):
        _start(monkeypatch, [SLOW, SLOW, SLOW])
