"""What a process of a run is doing: the calls that it has open, and what these wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedCall:
    """A call of a worker, and its seconds: since it began, or since it ended."""

    method: str
    seconds: float


@dataclass(frozen=True)
class RunningJob:
    """What a worker process of a user's function computes at this moment.

    kind: "reward function", "tool" or "agent". name: of the function. subject: the sample or row, as text. seconds:
    since it was sent. pid: of the process.
    """

    kind: str
    name: str
    subject: str
    seconds: float
    pid: int


@dataclass(frozen=True)
class WorkLoad:
    """What an engine's process has in hand: requests that run and that wait, jobs of users' functions."""

    num_running: int = 0
    num_queued: int = 0
    jobs: Sequence[RunningJob] = ()


@dataclass(frozen=True)
class WorkerCondition:
    """What a worker answers when it is asked for its condition.

    open_calls: the longest first. last: the call that it has finished last, None before the first.
    """

    pid: int
    open_calls: Sequence[TimedCall]
    last: TimedCall | None
    load: WorkLoad
