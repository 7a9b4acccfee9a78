"""One process that computes verdicts, from the side of its parent: started, told, heard, killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from megarl.rollout.rewards import LARGEST, Failure, Verdict
from megarl.types import UserFault

AT_ONCE = 64  # responses in flight to a function that is `async def`
GRACE_S = 1.0  # in which such a function gives up what takes too long
_LONGEST_LINE_BYTES = 2**20  # a worker's longest is some thousand letters
_PF_EXITING = 0x4  # Linux, include/linux/sched.h
_SOON_S, _LATE_S, _POLL_S = 0.2, 30.0, 0.01  # an end is waited for so long, unseen and seen


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

    def heard(self, worker: VerdictProcess, message: list[Any] | None) -> None:
        """None: no message of ours."""
        ...

    def lost(self, worker: VerdictProcess) -> None: ...


@dataclass
class Item:
    """One response that waits for its verdict. context: answer and row, as the worker reads them."""

    number: int
    context: bytes
    response: str
    found: asyncio.Future[Verdict | Failure]
    began: float = 0.0
    alone: bool = False  # others have no part in its worker's end, if it comes to that


class VerdictProcess(asyncio.Protocol):
    """One process. Without in_flight it is idle; without is_ready it is still importing the function."""

    def __init__(self, owner: Owner, order: Order) -> None:
        """Raises OSError when no process can be started."""
        self._owner, self._order = owner, order
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-P", "-m", "megarl.rollout.verdicts.worker"]
        try:
            with theirs:
                end = theirs.fileno()
                self.process = subprocess.Popen(
                    command, stdin=end, stdout=end, env=environment, start_new_session=True
                )
        except OSError:
            self.socket.close()
            raise
        self.is_ready, self.is_async, self.is_ending, self.is_gone = False, False, False, False
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
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines, self._rest = [*lines, b""], b""
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
        if self.is_gone or self.is_ending or not self.is_ready or any(item.alone for item in self.in_flight.values()):
            return False
        return len(self.in_flight) < AT_ONCE if self.is_async else not self.in_flight

    def deadline(self) -> float | None:
        """When the first of those in flight has taken too long.

        A process with many in flight may be late in giving up those that take too long: it has time while it speaks.
        """
        first = next(iter(self.in_flight.values()), None)
        if first is None or self.is_ending:
            return None
        end = first.began + self._order.timeout_s
        return max(end, min(self.heard_at, end + self._order.timeout_s)) + GRACE_S if self.is_async else end

    async def own_end(self) -> int | None:
        """The exit code of a process that has closed its link, or -1 times its signal; None for one that goes on.

        A process that ends closes its files first, and can be waited for a moment later.
        """
        self.is_ending = True
        began = time.monotonic()
        while (code := self.process.poll()) is None:
            bound_s = _LATE_S if _is_exiting(self.process.pid) else _SOON_S
            if time.monotonic() - began > bound_s:
                return None
            await asyncio.sleep(_POLL_S)
        return code

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


@dataclass(frozen=True)
class Reply:
    """What a worker says of one response. is_last: the process is good for no other."""

    number: int
    found: Verdict | Failure
    is_last: bool = False


def reply_of(message: list[Any] | None) -> Reply | None:
    """A worker's message about a response, None where it has another form than `worker` writes."""
    match message:
        case [int(number), str(words), bool(is_last)]:
            return Reply(number, Failure(words), is_last)
        case [int(number), int() | float() as reward, bool(correct), str() | None as answer] if abs(reward) <= LARGEST:
            return Reply(number, Verdict(reward, correct, answer))
    return None


def start_of(message: list[Any] | None) -> bool | UserFault | None:
    """A worker's first message: whether the function is asynchronous, or its fault; None where it is neither."""
    match message:
        case [bool(is_async)]:
            return is_async
        case [str(where), str(problem), str(mend)]:
            return UserFault(where, problem, mend)
    return None


def _is_exiting(pid: int) -> bool:
    """Whether the kernel is ending a process; True for one that has ended, or been waited for."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return True
    return state in ("Z", "X") or bool(int(fields[5]) & _PF_EXITING)


def _message(line: bytes) -> list[Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found else None
