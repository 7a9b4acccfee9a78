"""One process that computes verdicts, seen from its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.isolation.process import Job, WorkerProcess, as_line
from megarl.types.json_objects import CallArguments

AT_ONCE = 64  # responses in flight to a function that is `async def`
_GRACE_S = 1.0  # in which a worker of such a function cancels a call that takes too long
_LONGEST_LINE_BYTES = 2**20  # a worker's own lines have some thousand characters


@dataclass(frozen=True)
class RewardSpec:
    """A reward function with its limits. where: the recipe key that names it; start_s: the limit of its import."""

    where: str
    function: str
    arguments: CallArguments
    timeout_s: float
    memory_mb: int
    start_s: float


@dataclass(kw_only=True)
class Request(Job):
    """One response that waits for its verdict. context: answer and row, as the worker reads them.

    episode: what it is the end of, see `episode_dict`. sample: its place among the responses. cause: the span of their
    group, see `megarl.timeline.recorder`.
    """

    context: bytes
    response: str
    episode: Mapping[str, Any] | None
    sample: int
    cause: int


class RewardProcess(WorkerProcess):
    """One process of a reward function."""

    def __init__(self, spec: RewardSpec) -> None:
        """Raises OSError when no process can be started."""
        super().__init__(
            "megarl.rollout.reward_workers.reward_host", vars(spec), _LONGEST_LINE_BYTES
        )
        self._timeout_s = spec.timeout_s
        self.is_async = False
        self.takes_episode = False
        # while it has anything in flight, or since it was counted; 0: it has nothing
        self.works_since_s = 0.0
        self._context = b""

    def send(self, request: Request) -> None:
        if request.context != self._context:
            self._context = request.context
            self.write(request.context)
        self.in_flight[request.number] = request
        message = [request.number, request.response]
        if self.takes_episode:
            message.append(request.episode)
        self.write(as_line(message))

    def has_room(self) -> bool:
        is_shared = self.is_async and not any(job.alone for job in self.in_flight.values())
        return len(self.in_flight) < (AT_ONCE if is_shared else 1)

    def deadline(self) -> float | None:
        """A process with many in flight may be late in cancelling calls: it moves while it still sends messages."""
        first = self.first_in_flight()
        if first is None or self.is_ending:
            return None
        end = first.began + self._timeout_s
        if self.is_async:
            return max(end, min(self.message_at, end + self._timeout_s)) + _GRACE_S
        return end

    def culprit(self) -> Request | None:
        """The one that is in flight; of several it is not known."""
        return self.first_in_flight() if len(self.in_flight) == 1 else None

    def first_in_flight(self) -> Request | None:
        return next(iter(self.in_flight.values()), None)
