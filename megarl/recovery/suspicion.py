"""Which member of an exchange is given up when the exchange fails again and again, though every process lives. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.placement.engine_layout import EngineLayout


class Suspicion:
    """Chooses the member to give up; one object for all attempts at a version, and each engine once.

    A member that fails by itself says so, and one that is not ready is missed by all others: then the choice is known
    to be right. Where a connection fails both of its ends are suspected, and the one that is an end of the next
    failure, too, is given up. Where two attempts fail between the same two members, nothing that any member knows
    tells them apart. Then an engine is given up before a training rank, because it costs its start, and a rank all
    training since the newest copy; and of two engines the one that was not given up yet. So both have their turn, and
    the fault is gone after the second. Over NCCL a member that waits in vain suspects all with which it exchanges then,
    so that more engines may be given up before the right one.
    """

    def __init__(self, engines: EngineLayout) -> None:
        self._engines = engines
        self._before: Sequence[int] = ()
        self._latest: Sequence[int] = ()
        # engines
        self._given_up: set[int] = set()

    def note(self, suspects: Sequence[int]) -> None:
        """An attempt has failed by one of these members, the likeliest first; [] where nobody is suspected."""
        self._before = self._latest
        self._latest = suspects

    def give_up(self) -> int | None:
        """The member to give up after the latest attempt; None if nobody is suspected who was not given up before."""
        left = [member for member in self._latest if self.engine_of(member) not in self._given_up]
        member = min(left, key=self._cost, default=None)
        if member is not None and (engine := self.engine_of(member)) is not None:
            self._given_up.add(engine)
        return member

    def _cost(self, member: int) -> tuple[bool, bool]:
        """Less is given up first."""
        return member not in self._before, self.engine_of(member) is None

    def engine_of(self, member: int) -> int | None:
        """None for a training rank whose GPU has no engine."""
        place = self._engines.member(member)
        return place[0] if place else None
