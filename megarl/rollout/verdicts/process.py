"""One worker process, seen from its parent: starting it, sending responses to it, reading its messages, killing it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from megarl.rollout.rewards import Failure, Verdict

AT_ONCE = 64  # responses in flight to a function that is `async def`
_GRACE_S = 1.0  # in which a worker of such a function cancels a call that takes too long
_LONGEST_LINE_BYTES = 2**20  # a worker's own lines have some thousand characters
_PF_EXITING = 0x4  # Linux, include/linux/sched.h
_SOON_S, _LATE_S, _POLL_S = 0.2, 30.0, 0.01  # how long to wait for an exit that has not begun, and that has


@dataclass(frozen=True)
class RewardSpec:
    """A reward function with its limits. where: the recipe key that names it; start_s: the limit of its import."""

    where: str
    function: str
    arguments: Mapping[str, Any]
    timeout_s: float
    memory_mb: int
    start_s: float


@dataclass
class Request:
    """One response that waits for its verdict. context: answer and row, as the worker reads them."""

    number: int
    context: bytes
    response: str
    result: asyncio.Future[Verdict | Failure]
    began: float = 0.0
    alone: bool = False  # in flight without others, so that it is known which response ends the worker


class VerdictProcess:
    """One process. It is idle when in_flight is empty; until is_ready it imports the function."""

    def __init__(self, spec: RewardSpec) -> None:
        """Raises OSError when no process can be started."""
        self._spec = spec
        self._socket, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-P", "-m", "megarl.rollout.verdicts.worker"]
        try:
            with theirs:
                end = theirs.fileno()
                self.process = subprocess.Popen(
                    command, stdin=end, stdout=end, env=environment, start_new_session=True
                )
        except OSError:
            self._socket.close()
            raise
        self.is_ready, self.is_async, self.is_ending, self.is_gone = False, False, False, False
        self.in_flight: dict[int, Request] = {}
        self.batch, self.batch_began, self.batch_size = 1, 0.0, 1
        self._message_at = 0.0
        self._context = b""
        self._writer: asyncio.StreamWriter | None = None

    async def messages(self) -> AsyncIterator[list[Any] | None]:
        """Send the function's spec, then yield each message until the process closes its socket or is killed.

        None: a line that is not a message.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_LONGEST_LINE_BYTES)
        if self.is_gone:
            self._writer.transport.abort()
            return
        environment = {"parent": os.getpid(), "python_path": os.environ.get("PYTHONPATH")}
        self._write({**vars(self._spec), "arguments": dict(self._spec.arguments), **environment})
        with suppress(OSError):
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # the line is too long
                    line = b"\n"
                if self.is_gone or not line.endswith(b"\n"):
                    return
                self._message_at = asyncio.get_running_loop().time()
                yield _message(line)

    def send(self, request: Request) -> None:
        assert self._writer
        if request.context != self._context:
            self._context = request.context
            self._writer.write(request.context)
        self.in_flight[request.number] = request
        self._write([request.number, request.response])

    def _write(self, message: object) -> None:
        assert self._writer
        self._writer.write(json.dumps(message).encode() + b"\n")

    def has_room(self) -> bool:
        any_alone = any(request.alone for request in self.in_flight.values())
        if self.is_gone or self.is_ending or not self.is_ready or any_alone:
            return False
        return len(self.in_flight) < AT_ONCE if self.is_async else not self.in_flight

    def deadline(self) -> float | None:
        """The time at which the first response in flight has taken too long.

        A process with many in flight may be late in cancelling calls: its deadline moves while it still sends messages.
        """
        first = next(iter(self.in_flight.values()), None)
        if first is None or self.is_ending:
            return None
        end = first.began + self._spec.timeout_s
        return max(end, min(self._message_at, end + self._spec.timeout_s)) + _GRACE_S if self.is_async else end

    async def exit_code(self) -> int | None:
        """The exit code of a process that has closed its socket, or -1 times its signal; None: it still runs.

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
        """Kill the process and all that it has started, once: later its process id may belong to another process."""
        if self.is_gone:
            return
        self.is_gone = True
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()  # it may have left the group
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self._writer:
            self._writer.transport.abort()


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
