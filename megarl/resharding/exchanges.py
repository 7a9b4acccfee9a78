"""What a GPU takes part in during a run: exchanges of weights, and of adapters on their own."""

from __future__ import annotations

from megarl.resharding.member import Member
from megarl.resharding.payloads import Params, PayloadName
from megarl.resharding.session import Session


class Exchanges:
    """The members of one GPU slot, one for each payload; at most one of them has a process group at a time."""

    def __init__(self, session: Session, params: Params) -> None:
        """params: of the slot's training rank, with the factors of its adapters; empty where it has none."""
        self.session = session
        self._params = params
        self._members: dict[PayloadName, Member] = {}

    def of(self, payload: PayloadName) -> Member:
        """The member of the exchanges of this payload; the group of another one is ended."""
        for name, member in self._members.items():
            if name != payload:
                member.close()
        if payload not in self._members:
            self._members[payload] = Member(self.session, self._params, payload)
        return self._members[payload]

    def close(self) -> None:
        """End the process groups."""
        for member in self._members.values():
            member.close()
