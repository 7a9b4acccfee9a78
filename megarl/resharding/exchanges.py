"""What a GPU takes part in during a run: exchanges of weights, and of adapters on their own."""

from __future__ import annotations

from megarl.resharding.contents import ContentName, Params
from megarl.resharding.member import Member
from megarl.resharding.session import Session


class Exchanges:
    """The members of one GPU slot, one for each content; at most one of them has a process group at a time."""

    def __init__(self, session: Session, params: Params) -> None:
        """params: of the slot's training rank, with the factors of its adapters; empty where it has none."""
        self.session, self._params = session, params
        self._members: dict[ContentName, Member] = {}

    def of(self, content: ContentName) -> Member:
        """The member of the exchanges of this content; the group of another one is ended."""
        for name, member in self._members.items():
            if name != content:
                member.close()
        if content not in self._members:
            self._members[content] = Member(self.session, self._params, content)
        return self._members[content]

    def close(self) -> None:
        """End the process groups."""
        for member in self._members.values():
            member.close()
