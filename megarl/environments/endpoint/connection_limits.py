"""Which connections of a listener may stay: those without a key cannot take the places of those with one."""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Generic, TypeVar

MOST_AUTHENTICATED = 2048  # connections of a listener that have shown the key of an open episode
MOST_UNAUTHENTICATED = 512  # the others of a listener, while it has the most authenticated ones
_LISTENERS = 2
_SHARES = 2  # of the files that this process may open; one share is left to the engine
# The event loop sees a connection's key three turns after it has taken it, and takes others in each. More than three,
# as a margin.
_TURNS_TO_BE_HEARD = 8

Connection = TypeVar("Connection")


class ConnectionLimits(Generic[Connection]):
    """The connections of one listener. What a method returns is to be closed, and has no place any more.

    Every connection begins unauthenticated, and many agents may begin at once: so unauthenticated connections may have
    all places that no authenticated one has. Where all places are taken, one goes for each new connection: the oldest
    that has sent a wrong key, or else the oldest that has sent none. Connections that only stay have no advantage.
    An authenticated connection takes its place with it, up to the limit of its kind; there the longest idle one goes
    for it, so that no episode can hold all places.
    """

    def __init__(self) -> None:
        # unauthenticated, after a request without a key; the oldest first
        self._refused: OrderedDict[Connection, None] = OrderedDict()
        self._unauthenticated: OrderedDict[Connection, None] = (
            OrderedDict()
        )  # the others of these; the oldest first
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # the longest idle first
        self._busy: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection) -> Connection | None:
        """A new connection has come."""
        self._unauthenticated[connection] = None
        if sum(map(len, self._kinds())) <= most_authenticated() + most_unauthenticated():
            return None
        return (self._refused or self._unauthenticated).popitem(last=False)[0]

    def authenticate(self, connection: Connection) -> tuple[bool, Connection | None]:
        """A request with a key begins. Whether there is a place for it, and the idle connection that goes for it.

        Without a place the connection stays what it was.
        """
        closed = None
        is_authenticated = connection in self._idle or connection in self._busy
        if not is_authenticated and len(self._idle) + len(self._busy) >= most_authenticated():
            if not self._idle:
                return False, None
            closed = self._idle.popitem(last=False)[0]
        self.remove(connection)
        self._busy[connection] = None
        return True, closed

    def mark_idle(self, connection: Connection) -> None:
        """Its request has been answered; nothing where the connection is closed, or had no place."""
        if connection in self._busy:
            del self._busy[connection]
            self._idle[connection] = None

    def revoke(self, connection: Connection) -> None:
        """It has sent a request without the key of an open episode: it is unauthenticated from now on."""
        if connection not in self._refused:
            self.remove(connection)
            self._refused[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        for kind in self._kinds():
            kind.pop(connection, None)

    def _kinds(self) -> tuple[OrderedDict[Connection, None], ...]:
        return self._refused, self._unauthenticated, self._idle, self._busy


def most_unauthenticated() -> int:
    return min(MOST_UNAUTHENTICATED, _room() // 4)


def most_authenticated() -> int:
    return min(MOST_AUTHENTICATED, _room() - most_unauthenticated())


def taken_at_once() -> int:
    """How many connections a turn of the event loop may take, before it reads what has come.

    So few that a connection whose request is there already is read before as many others have come as may push it out,
    whoever connects, also while the listener has the most authenticated connections.
    """
    return max(1, most_unauthenticated() // _TURNS_TO_BE_HEARD)


def files_for_most() -> int:
    """How many files this process must be allowed to open, so that each listener can have the most connections."""
    return _SHARES * _LISTENERS * (MOST_AUTHENTICATED + MOST_UNAUTHENTICATED)


def _room() -> int:
    """The connections that a listener may have, by the files that this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_AUTHENTICATED + MOST_UNAUTHENTICATED
    return max(8, soft // (_SHARES * _LISTENERS))
