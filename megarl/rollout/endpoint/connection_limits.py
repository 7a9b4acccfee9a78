"""Which connections of a listener may stay: those without a key cannot take the places of those with one. Pure."""

from __future__ import annotations

import resource
from typing import Generic, TypeVar

MOST_AUTHENTICATED = 2048  # connections of a listener that have shown the key of an open episode
MOST_UNAUTHENTICATED = 512  # the others of a listener
_LISTENERS = 2

Connection = TypeVar("Connection")


class ConnectionLimits(Generic[Connection]):
    """The connections of one listener. What a method returns is to be closed, and has no place any more.

    Every connection begins unauthenticated. Where there are too many of these the oldest is closed, so that a new one
    can always show a key: it sends it at once, and connections that only stay have no advantage. An authenticated
    connection that has no request in flight can be closed for another, too, the longest idle one first: so no episode
    can hold all places.
    """

    def __init__(self) -> None:
        self._unauthenticated: dict[Connection, None] = {}  # the oldest first
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._busy: dict[Connection, None] = {}

    def add(self, connection: Connection) -> Connection | None:
        """A new connection has come."""
        self._unauthenticated[connection] = None
        return _first(self._unauthenticated) if len(self._unauthenticated) > most_unauthenticated() else None

    def authenticate(self, connection: Connection) -> tuple[bool, Connection | None]:
        """A request with a key begins. Whether there is a place for it, and the idle connection that goes for it.

        Without a place the connection stays what it was.
        """
        is_authenticated = connection in self._idle or connection in self._busy
        is_full = not is_authenticated and len(self._idle) + len(self._busy) >= most_authenticated()
        if is_full and not self._idle:
            return False, None
        closed = _first(self._idle) if is_full else None
        self.remove(connection)
        self._busy[connection] = None
        return True, closed

    def mark_idle(self, connection: Connection) -> None:
        """Its request has been answered; nothing where the connection is closed, or had no place."""
        if connection in self._busy:
            del self._busy[connection]
            self._idle[connection] = None

    def revoke(self, connection: Connection) -> Connection | None:
        """It has sent a request without the key of an open episode: it is unauthenticated from now on."""
        if connection in self._unauthenticated:
            return None
        self.remove(connection)
        return self.add(connection)

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        for kind in (self._unauthenticated, self._idle, self._busy):
            kind.pop(connection, None)


def _first(connections: dict[Connection, None]) -> Connection:
    """Take the first out."""
    first = next(iter(connections))
    del connections[first]
    return first


def most_unauthenticated() -> int:
    return min(MOST_UNAUTHENTICATED, _room() // 4)


def most_authenticated() -> int:
    return min(MOST_AUTHENTICATED, _room() - most_unauthenticated())


def _room() -> int:
    """The connections of a listener. Half of the files that this process may have open are left to the engine."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 // _LISTENERS)
