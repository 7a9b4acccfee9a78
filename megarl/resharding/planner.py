"""The plan of one member's exchanges: made in the first exchange, and kept until experts get other places."""

from __future__ import annotations

import time
from functools import cached_property

from megarl.placement.expert_places import Places
from megarl.resharding.execute import Executor
from megarl.resharding.payloads import Params, Payload
from megarl.resharding.reshard_plan import MemberPlan, Streams, plan_streams
from megarl.resharding.session import Session


class Planner:
    """Plans the exchanges of one payload for one member, which makes the planner and keeps it.

    A plan is of the places that experts have: `place` drops it where they move.

    seconds: the time that planning has taken since the planner was made. The cost of one exchange is what it adds.
    """

    def __init__(self, session: Session, payload: Payload) -> None:
        self.seconds = 0.0
        self._session = session
        self._payload = payload
        self._plan: tuple[list[int], MemberPlan] | None = None  # (rounds of each send stage, plan)
        self._executor: Executor | None = None

    @cached_property
    def streams(self) -> Streams:
        """What this member sends and receives, the same in all exchanges of these places. Raises LayoutError."""
        started = time.perf_counter()
        streams = plan_streams(
            self._payload.source_parts,
            self._payload.target_parts,
            self._session.member,
            self._session.num_members,
            gpus_per_node=self._session.gpus_per_node,
            dtype=self._session.dtype,
        )
        self.seconds += time.perf_counter() - started
        return streams

    def executor(self, rounds: list[int], targets: Params) -> Executor:
        """The executor for these rounds of each send stage, made again where they or the parameters have changed."""
        started = time.perf_counter()
        sources = self._payload.sources
        if self._plan is None or self._plan[0] != rounds:
            self._plan = (rounds, self.streams.assign(rounds))
            self._executor = None
        if self._executor is None or not self._executor.fits(sources, targets):
            plan = self._plan[1]
            self._executor = Executor(
                plan,
                sources,
                targets,
                self._payload.transform,
                self._session.engine.precision.scales,
            )
            self.seconds += time.perf_counter() - started
        return self._executor

    def place(self, places: Places | None) -> None:
        """Plan anew where the engines' experts are to have other places than in the exchange before."""
        if self._payload.place(places):
            self.__dict__.pop("streams", None)
            self._plan = None
            self._executor = None

    def drop_executor(self) -> None:
        """Release the executor with its views of the parameters; the plan is kept."""
        self._executor = None
