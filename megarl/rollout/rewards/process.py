"""One process that computes verdicts, from the side of its parent: started, told, heard, killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from megarl.rollout.rewards import Failure, Verdict

AT_ONCE = 64  # responses in flight to a function that is `async def`
GRACE_S = 1.0  # in which such a function gives up what takes too long


@dataclass(frozen=True)
class Order:
    """What a worker judges with, and within which bounds. where: the recipe key that names the function."""

    where: str
    function: str
    arguments: Mapping[str, Any]
    timeout_s: float
    memory_mb: int
    start_s: float  # in which the function has to be imported


class Owner(Protocol):
    """Who is told of what a worker says."""

    def heard(self, worker: Worker, message: list[Any] | None) -> None:
        """None: no message of ours."""
        ...

    def lost(self, worker: Worker) -> None: ...


@dataclass
class Item:
    """One response that waits for its verdict. context: answer and row, as the worker reads them."""

    number: int
    context: bytes
    response: str
    found: asyncio.Future[Verdict | Failure]
    began: float = 0.0
    alone: bool = False  # others have no part in its worker's end, if it comes to that


class Worker(asyncio.Protocol):
    """One process. Without in_flight it is idle; without is_ready it is still importing the function."""

    def __init__(self, owner: Owner, order: Order) -> None:
        """Raises OSError when no process can be started."""
        self._owner, self._order = owner, order
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-P", "-m", "megarl.rollout.rewards.worker"]
        try:
            with theirs:
                end = theirs.fileno()
                self.process = subprocess.Popen(
                    command, stdin=end, stdout=end, env=environment, start_new_session=True
                )
        except OSError:
            self.socket.close()
            raise
        self.is_ready, self.is_async, self.is_gone = False, False, False
        self.in_flight: dict[int, Item] = {}
        self.batch, self.batch_began, self.batch_size = 1, 0.0, 1
        self.heard_at = 0.0
        self._context, self._rest = b"", b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self.is_gone:
            transport.abort()
            return
        self._tell(
            {
                "parent": os.getpid(),
                "python_path": os.environ.get("PYTHONPATH"),
                "where": self._order.where,
                "function": self._order.function,
                "arguments": dict(self._order.arguments),
                "timeout_s": self._order.timeout_s,
                "memory_mb": self._order.memory_mb,
            }
        )

    def data_received(self, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self.is_gone:
                self._owner.heard(self, _message(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)

    def _tell(self, message: object) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def send(self, item: Item) -> None:
        if item.context != self._context:
            self._context = item.context
            self._write(item.context)
        self.in_flight[item.number] = item
        self._tell([item.number, item.response])

    def _write(self, line: bytes) -> None:
        assert self._transport
        self._transport.write(line)

    def has_room(self) -> bool:
        if self.is_gone or not self.is_ready or any(item.alone for item in self.in_flight.values()):
            return False
        return len(self.in_flight) < AT_ONCE if self.is_async else not self.in_flight

    def deadline(self) -> float | None:
        """When the first of those in flight has taken too long.

        A process with many in flight may be late in giving up those that take too long: it has time while it speaks.
        """
        first = next(iter(self.in_flight.values()), None)
        if first is None:
            return None
        end = first.began + self._order.timeout_s
        return max(end, min(self.heard_at, end + self._order.timeout_s)) + GRACE_S if self.is_async else end

    def kill(self) -> None:
        """It and all that it has started, once: while it is not reaped its number is nobody else's."""
        if self.is_gone:
            return
        self.is_gone = True
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()  # it may have left the group
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self._transport:
            self._transport.abort()


def _message(line: bytes) -> list[Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found else None
