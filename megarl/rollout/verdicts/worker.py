"""The process that computes verdicts: `python -m megarl.rollout.verdicts.worker`, started by `pool`.

JSON lines on the socket that is its standard input and output. In: first an object, what to judge with; then
`[answer, row]`, for all responses that follow, and `[number, response]` for each of them. Out: first `[is_async]`, or
the fault `[where, problem, mend]`; then, of each response, `[number, reward, correct, answer]`, or `[number, words,
is_last]` where there is no verdict, is_last if the process is good for no other.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.rollout.rewards import Failure, Reward, Verdict, load_reward, said, verdict_of
from megarl.types import UserFault

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 2**30
LINK_CLOSED = 117  # exit code
_spare = [bytes(4 * 2**20)]  # for the words of an end for want of memory


class Link:
    """The socket, taken away from the function: what that prints goes to standard error, and it reads nothing."""

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=os.dup(0))
        self._file = self.socket.makefile("rb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives

    def read(self) -> Any:
        """The next line, or None at the end."""
        with _ended_without_link():
            line = self._file.readline()
        return json.loads(line) if line else None

    def write(self, message: object) -> None:
        with _ended_without_link():
            self.socket.sendall(_line(message))

    def close_in_child(self) -> None:
        """Or a fork of the function's would keep the parent from seeing the end of this process."""
        os.close(self.socket.detach())


@contextmanager
def _ended_without_link() -> Iterator[None]:
    """End the process, in a way that the parent knows, where the function has closed the socket."""
    try:
        yield
    except OSError:
        os._exit(LINK_CLOSED)


def main() -> None:
    """Judge until there is nothing more to judge, or until the parent is gone."""
    die_with_parent()
    link = Link()
    order = link.read()
    if order is None or os.getppid() != order["parent"]:
        return  # it was gone before it could be died with
    _restore_search_path(order["python_path"])
    os.register_at_fork(after_in_child=link.close_in_child)
    os.register_at_fork(after_in_child=die_with_parent)
    try:
        reward = load_reward(order["function"], order["arguments"], order["where"])
    except UserFault as fault:
        link.write([fault.where, fault.problem, fault.mend])
        return
    is_async = _is_async(reward)
    _limit_memory(order["memory_mb"])
    link.write([is_async])
    if is_async:
        asyncio.run(_judge_together(link, reward, order["timeout_s"]))
    else:
        _judge_in_turn(link, reward)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _restore_search_path(python_path: str | None) -> None:
    """The environment as the parent has it, for what the function starts; sys.path stays."""
    os.environ.pop("PYTHONPATH", None)
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path


def _limit_memory(memory_mb: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _is_async(reward: Reward) -> bool:
    function = getattr(reward, "func", reward)  # of a partial
    call = getattr(type(function), "__call__", None)  # noqa: B004 - of an object that is called like a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _judge_in_turn(link: Link, reward: Reward) -> None:
    answer, row = "", {}
    while (message := link.read()) is not None:
        if len(message) == 2 and isinstance(message[0], str):
            answer, row = message
            continue
        number, response = message
        found = _judge(reward, response, answer, row)
        link.write(_reply(number, found))
        _wait_without_memory(found)


def _judge(reward: Reward, response: str, answer: str, row: Mapping[str, Any]) -> Verdict | Failure | MemoryError:
    try:
        return verdict_of(reward(response, answer, row))
    except MemoryError as error:
        _spare.clear()
        return error
    except BaseException as error:  # a user's function raises what it likes, and ends no process of ours
        return Failure(f"raised {said(error)}")


async def _judge_together(link: Link, reward: Reward, timeout_s: float) -> None:
    """Every response as it comes: how many there are at once is the parent's choice."""
    reader, writer = await asyncio.open_connection(sock=link.socket, limit=_LINE_BYTES)
    tasks: set[asyncio.Task[None]] = set()

    async def judge(number: int, response: str, answer: str, row: Mapping[str, Any]) -> None:
        found: Verdict | Failure | MemoryError
        try:
            async with asyncio.timeout(timeout_s) as bound:
                found = verdict_of(await reward(response, answer, row))
        except TimeoutError as error:
            found = Failure(too_long(timeout_s) if bound.expired() else f"raised {said(error)}")
        except MemoryError as error:
            _spare.clear()
            found = error
        except BaseException as error:
            found = Failure(f"raised {said(error)}")
        writer.write(_line(_reply(number, found)))
        _wait_without_memory(found)

    answer, row = "", {}
    while line := await reader.readline():
        message = json.loads(line)
        if isinstance(message[0], str):
            answer, row = message
            continue
        number, response = message
        task = asyncio.create_task(judge(number, response, answer, row))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _reply(number: int, found: Verdict | Failure | MemoryError) -> list[object]:
    if isinstance(found, Verdict):
        return [number, found.reward, found.correct, found.answer]
    return [number, found.words, False] if isinstance(found, Failure) else [number, "ran out of memory", True]


def _wait_without_memory(found: object) -> None:
    while isinstance(found, MemoryError):
        signal.pause()  # what is left of its memory is in pieces; the parent kills it when it has read why


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def too_long(timeout_s: float) -> str:
    """The words of a verdict that was not waited for."""
    return f"took longer than {timeout_s:g} s"


if __name__ == "__main__":
    main()
