"""The process that computes verdicts: `python -m megarl.rollout.verdicts.worker`, started by `pool`.

It reads and writes JSON lines on the socket that is its standard input and output. Input: first an object, the fields
of a `RewardSpec`; then `[answer, row]`, which holds for all responses that follow, and `[number, response]` for each
response. Output: first `[is_async]`, or the fault `[where, problem, mend]`; then for each response
`[number, reward, correct, answer]`, or `[number, words, is_last]` where there is no verdict. is_last: the process can
compute no other verdict.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.rollout.rewards import Failure, Reward, Verdict, describe_error, load_reward, verdict_of
from megarl.rollout.sandbox.inside_launcher import limit
from megarl.types import UserFault

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 2**30
SOCKET_CLOSED = 117  # exit code
_OUT_OF_MEMORY = Failure("ran out of memory")
_spare = [bytes(4 * 2**20)]  # freed when the memory is full, so that the process can still report it


class ParentSocket:
    """The socket, out of the function's reach: what the function prints goes to standard error, its input is empty."""

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=os.dup(0))
        self._file = self.socket.makefile("rb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives

    def read(self) -> Any:
        """The next message, or None at the end."""
        with _exit_if_closed():
            line = self._file.readline()
        return json.loads(line) if line else None

    def write(self, line: bytes) -> None:
        with _exit_if_closed():
            self.socket.sendall(line)

    def close_in_child(self) -> None:
        """Close the copy of a process that the function forks, which would hide the end of this one from the parent."""
        os.close(self.socket.detach())


@contextmanager
def _exit_if_closed() -> Iterator[None]:
    """Exit with a code that the parent knows if the function has closed the socket."""
    try:
        yield
    except OSError:
        os._exit(SOCKET_CLOSED)


def main() -> None:
    """Score responses until the parent closes the socket or ends."""
    die_with_parent()
    parent = ParentSocket()
    spec = parent.read()
    if spec is None or os.getppid() != spec["parent"]:
        return  # the parent ended before die_with_parent
    os.environ.pop("PYTHONPATH", None)  # what the function starts gets the parent's; sys.path stays
    if spec["python_path"] is not None:
        os.environ["PYTHONPATH"] = spec["python_path"]
    os.register_at_fork(after_in_child=parent.close_in_child)
    os.register_at_fork(after_in_child=die_with_parent)
    try:
        reward = load_reward(spec["function"], spec["arguments"], spec["where"])
    except UserFault as fault:
        parent.write(_line([fault.where, fault.problem, fault.mend]))
        return
    is_async = _is_async(reward)
    _limit_memory(spec["memory_mb"])
    parent.write(_line([is_async]))
    if is_async:
        asyncio.run(_score_together(parent, reward, spec["timeout_s"]))
    else:
        _score_in_turn(parent, reward)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _limit_memory(memory_mb: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_mb * 2**20)
    limit(resource.RLIMIT_CORE, 0)


def _is_async(reward: Reward) -> bool:
    function = getattr(reward, "func", reward)  # of a partial
    call = getattr(type(function), "__call__", None)  # noqa: B004 - of an object that is called like a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _score_in_turn(parent: ParentSocket, reward: Reward) -> None:
    answer, row = "", {}
    while (message := parent.read()) is not None:
        if isinstance(message[0], str):
            answer, row = message
            continue
        number, response = message
        try:
            result = verdict_of(reward(response, answer, row))
        except BaseException as error:  # a user's function raises any exception, and must not end this process
            result = _failure(error)
        _reply(parent.write, number, result)


async def _score_together(parent: ParentSocket, reward: Reward, timeout_s: float) -> None:
    """Score every response as it comes: the parent decides how many are in flight."""
    reader, writer = await asyncio.open_connection(sock=parent.socket, limit=_LINE_BYTES)
    tasks: set[asyncio.Task[None]] = set()

    async def score(number: int, response: str, answer: str, row: Mapping[str, Any]) -> None:
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                result = verdict_of(await reward(response, answer, row))
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and bound.expired()
            result = Failure(too_long(timeout_s)) if is_late else _failure(error)
        _reply(writer.write, number, result)

    answer, row = "", {}
    while line := await reader.readline():
        message = json.loads(line)
        if isinstance(message[0], str):
            answer, row = message
            continue
        number, response = message
        task = asyncio.create_task(score(number, response, answer, row))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _failure(error: BaseException) -> Failure:
    """The failure of a function that raised an exception."""
    if isinstance(error, MemoryError):
        _spare.clear()
        return _OUT_OF_MEMORY
    return Failure(f"raised {describe_error(error)}")


def _reply(write: Callable[[bytes], object], number: int, result: Verdict | Failure) -> None:
    """Write a response's result; does not return when the memory is full."""
    if isinstance(result, Verdict):
        write(_line([number, result.reward, result.correct, result.answer]))
    else:
        write(_line([number, result.words, result is _OUT_OF_MEMORY]))
    while result is _OUT_OF_MEMORY:
        signal.pause()  # its memory is too fragmented to go on; the parent kills it when it has read the reply


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def too_long(timeout_s: float) -> str:
    """The words of a failure by timeout."""
    return f"took longer than {timeout_s:g} s"


if __name__ == "__main__":
    main()
