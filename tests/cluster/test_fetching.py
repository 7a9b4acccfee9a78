"""A result that does not come is waited for in a thread, while somebody looks at the workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray.exceptions

from megarl.cluster import fetching


class SlowResult:
    """In the place of `ray.get`: the result of a node that answers once it is let go."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.asked_s: list[float] = []

    def get(self, refs: str, timeout: float) -> str:
        self.asked_s.append(timeout)
        if not self.is_there.wait(timeout):
            raise ray.exceptions.GetTimeoutError
        return refs.upper()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowResult:
    result = SlowResult()
    monkeypatch.setattr(fetching.ray, "get", result.get)
    monkeypatch.setattr(fetching, "_LOOK_S", 0.01)
    return result


def never() -> None:
    raise AssertionError("nobody has to look")


def test_what_is_there_is_fetched_at_once(slow: SlowResult) -> None:
    slow.is_there.set()
    assert fetching.fetch("done", 60.0, never) == "DONE"
    assert len(slow.asked_s) == 1


def test_what_comes_late_is_asked_for_once_more_and_waited_for(slow: SlowResult) -> None:
    assert fetching.fetch("late", 60.0, slow.is_there.set) == "LATE"
    assert slow.asked_s == [0.01, 60.0]


def test_what_a_look_finds_ends_the_wait(slow: SlowResult) -> None:
    def look() -> Any:
        raise RuntimeError("the node is gone")

    with pytest.raises(RuntimeError, match="the node is gone"):
        fetching.fetch("lost", 60.0, look)
    slow.is_there.set()


def test_what_never_comes_raises_as_ray_does(slow: SlowResult) -> None:
    with pytest.raises(ray.exceptions.GetTimeoutError):
        fetching.fetch("never", 0.1, lambda: None)
