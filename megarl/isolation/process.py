"""One worker process, seen from its parent: starting it, writing jobs to it, reading its messages, killing it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from megarl.isolation.child import HELLO, as_line
from megarl.isolation.keeper import KILLS_FOR_S
from megarl.types.reward_result import LARGEST_REWARD, RewardResult

# so long it may take to end what the worker has started, and itself
_KEEPER_ENDS_S = KILLS_FOR_S + 5.0
_PF_EXITING = 0x4  # Linux, include/linux/sched.h
# how long to wait for an exit that has not begun, and that has
_SOON_S = 0.2
_LATE_S = 30.0
_POLL_S = 0.01
# Of the run alone: whoever has Ray's token can run code in its processes, and the others are its trackers'.
_SECRETS_OF_RUN = (
    "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"
)  # fmt: skip
EndKind = Literal["timeout", "memory", "ended"]


@dataclass(frozen=True)
class ProcessEnd:
    """Why a worker process was ended, in a few words about the job that is to blame.

    is_foreign: others may have done it, such as a machine that is short of memory, or whoever stopped the process.
    """

    kind: EndKind
    words: str
    is_foreign: bool = False


@dataclass
class Job:
    """What waits for a worker, or is with one.

    alone: in flight without others, so that it is known which job ends the worker. worker: the only one that can do it,
    because it holds its state; None: any can. was_killed: it was in a worker that others may have ended; the next such
    end is not taken for theirs.
    """

    number: int
    result: asyncio.Future[Any]
    began: float = 0.0
    alone: bool = False
    worker: WorkerProcess | None = None
    was_killed: bool = False


@dataclass(frozen=True)
class Lost:
    """The result of a job whose own worker was ended without it being to blame; is_suspect: or perhaps it was.

    was_killed: others may have ended the worker while it did the job.
    """

    is_suspect: bool
    was_killed: bool = False


class WorkerProcess:
    """One process. It is idle when in_flight is empty; until is_ready it imports what it runs.

    `process` is its keeper (`keeper.py`), which ends as the worker does, after all that the worker has started.
    """

    def __init__(self, module: str, spec: Mapping[str, Any], longest_line_bytes: int) -> None:
        """module: its `main` is the worker; spec: its first message. Raises OSError when no process can be started."""
        self._spec = spec
        self._longest_line_bytes = longest_line_bytes
        self._socket, theirs = socket.socketpair()
        python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**_environment(as_line(spec)), "PYTHONPATH": python_path}
        command = [sys.executable, "-P", "-m", "megarl.isolation.entry", module]
        try:
            with theirs:
                end = theirs.fileno()
                self.process = subprocess.Popen(
                    command, stdin=end, stdout=end, env=environment, start_new_session=True
                )
        except OSError:
            self._socket.close()
            raise
        self.is_ready = False
        self.is_ending = False
        self.is_gone = False
        self.in_flight: dict[int, Any] = {}
        self.waiting: deque[Any] = deque()  # jobs that only this process can do
        self.message_at = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._worker_pid: int | None = None

    @property
    def pid(self) -> int:
        """The worker's process id, once it has told it."""
        return self.process.pid if self._worker_pid is None else self._worker_pid

    async def messages(self) -> AsyncIterator[list[Any] | None]:
        """Send the spec, then yield each message until the process closes its socket or is killed.

        None: a line that is not a message.
        """
        reader, self._writer = await asyncio.open_connection(
            sock=self._socket, limit=self._longest_line_bytes
        )
        if self.is_gone:
            self._writer.transport.abort()
            return
        environment = {"parent": os.getpid(), "python_path": os.environ.get("PYTHONPATH")}
        self.write(as_line({**self._spec, **environment}))
        with suppress(OSError):
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # the line is too long
                    line = b"\n"
                if self.is_gone or not line.endswith(b"\n"):
                    return
                self.message_at = asyncio.get_running_loop().time()
                message = _message(line)
                if self._worker_pid is None and message and message[0] == HELLO:
                    self._worker_pid = message[1]
                    continue
                yield message

    def write(self, line: bytes) -> None:
        assert self._writer
        self._writer.write(line)

    def deadline(self) -> float | None:
        """The time at which the first job in flight has taken too long; None: there is none."""
        raise NotImplementedError

    def culprit(self) -> Any:
        """The job that is to blame when the process has to end; None when several may be."""
        raise NotImplementedError

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, as SIGSTOP does, so that it does nothing until SIGCONT."""
        return _state(self.pid)[:1] == ["T"]

    async def exit_code(self) -> int | None:
        """The exit code of a process that has closed its socket, or -1 times its signal; None: it still runs.

        A process that ends closes its files first, and can be waited for a moment later.
        """
        self.is_ending = True
        began = time.monotonic()
        while (code := self.process.poll()) is None:
            bound_s = _LATE_S if _is_exiting(self.pid) else _SOON_S
            if time.monotonic() - began > bound_s:
                return None
            await asyncio.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Let the keeper kill the process and all that it has started; `reap` waits for the end of all."""
        if self.is_gone:
            return
        self.is_gone = True
        if self.process.poll() is None:
            self.process.terminate()
            # the worker may have stopped its keeper, which then hears nothing
            self.process.send_signal(signal.SIGCONT)
        if self._writer:
            self._writer.transport.abort()

    def reap(self) -> None:
        """Wait for the end of a process that was killed; blocks.

        A keeper that does not act in time, because it is stopped again and again, is killed, and the kernel kills the
        worker with it. What the worker has started may then go on.
        """
        try:
            self.process.wait(_KEEPER_ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            # the kernel cannot end it: nobody can wait for that
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_KEEPER_ENDS_S)


def read_reward_result(fields: list[Any]) -> RewardResult | None:
    """The reward result that a worker has written as the list of its fields; None: it is not one."""
    match fields:
        case [int() | float() as reward, bool(correct), str() | None as answer] if (
            abs(reward) <= LARGEST_REWARD
        ):
            return RewardResult(float(reward), correct, answer)
    return None


def describe_exit(code: int) -> str:
    """How a process ended: its exit code, or -1 times the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def _environment(spec: bytes) -> dict[str, str]:
    """This process's, without the secrets of the run, but for those that an argument in the spec names (`key_env`)."""
    hidden = [name for name in _SECRETS_OF_RUN if as_line(name).strip() not in spec]
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _is_exiting(pid: int) -> bool:
    """Whether the kernel is ending a process; True for one that has ended, or been waited for."""
    fields = _state(pid)
    return not fields or fields[0] in ("Z", "X") or bool(int(fields[6]) & _PF_EXITING)


def _state(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _message(line: bytes) -> list[Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, list) and message else None
