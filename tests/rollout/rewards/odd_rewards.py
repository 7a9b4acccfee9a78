"""Rewards that do what no reward should, as the response says."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping
from typing import Any

from megarl.types.reward_result import RewardResult

_kept: list[Any] = []


def score(response: str, answer: str, row: Mapping[str, Any]) -> Any:
    """1 for the answer; else what the response's first word says."""
    word, _, rest = response.partition(" ")
    return _ODD[word](rest) if word in _ODD else float(response == answer)


def _deaf(_: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(100)


def _fill(_: str) -> None:
    while True:
        _kept.append(bytes(16 * 2**20))  # untouched: it is the address space that is bounded


def _daemon(path: str) -> None:
    """A process that no other is the parent of, in a session of its own: it has forked twice."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        while not os.path.exists(path):
            time.sleep(0.01)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    _write(path, os.getpid())
    _deaf("")


def _daemon_and_deaf(path: str) -> None:
    _daemon(path)
    _deaf("")


def _fork_and_leave(path: str) -> None:
    _daemon(path)
    os._exit(3)


def _nest(levels: str) -> float:
    """Forks of a fork, each of which ends in order."""
    child = os.fork()
    if child == 0:
        if int(levels) > 1:
            _nest(str(int(levels) - 1))
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def _write(path: str, pid: int) -> None:
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        file.write(str(pid))
    os.replace(f"{path}.partial", path)


def _flood(_: str) -> float:
    for _number in range(2000):
        print("[0, 1.0, true]", "x" * 80)
        sys.__stdout__.write("[0, 1.0, true]\n")  # type: ignore[union-attr]
    os.write(1, b"[0, 1.0, true]\n")
    return 0.25


def _links() -> list[int]:
    """The sockets of this process, of which one leads to its parent."""
    return [
        int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_socket(int(name))
    ]


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # of the listing itself
        return False


def _close(then: str) -> Any:
    os.closerange(3, 4096)
    return _ODD[then]("3") if then else 1.0


def _shut(_: str) -> None:
    for number in _links():
        socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_WR)
    _deaf("")


def _reply(text: str) -> None:
    """Writes to the parent in the worker's place."""
    for number in _links():
        os.write(number, text.encode() + b"\n")
    _deaf("")


def _pour(_: str) -> None:
    for number in _links():
        for _block in range(64):
            os.write(number, b"[" * 2**20)
    _deaf("")


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


_ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("no unit"),
    "SystemExit": SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Unprintable": _Unprintable(),
}


def _raise(name: str) -> None:
    raise _ERRORS[name]


def _recurse(_: str) -> Any:
    return _recurse(_)


_ODD = {
    "deaf": _deaf,
    "fill": _fill,
    "exit": lambda code: os._exit(int(code)),
    "signal": lambda number: os.kill(os.getpid(), int(number)),
    "segfault": lambda _: ctypes.string_at(0),
    "daemon": _daemon_and_deaf,
    "nest": _nest,
    "fork_and_leave": _fork_and_leave,
    "flood": _flood,
    "close": _close,
    "shut": _shut,
    "exec": lambda _: os.execv("/bin/sleep", ["sleep", "1000"]),
    "reply": _reply,
    "pour": _pour,
    "raise": _raise,
    "recurse": _recurse,
    "nan": lambda _: float("nan"),
    "words": lambda _: "good",
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "read": lambda _: float(len(sys.stdin.read())),
    "sleep": lambda seconds: time.sleep(float(seconds)) or 1.0,
}


def of_row(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 if the response is the row as JSON."""
    return float(json.loads(response) == row)


def of_json(response: str, answer: str, row: Mapping[str, Any]) -> float:
    return float(json.loads(response)["value"] == 42)


def worth(
    response: str, answer: str, row: Mapping[str, Any], *, right: float, wrong: float = 0.0
) -> RewardResult:
    return RewardResult(right if response == answer else wrong, response == answer)


async def patient(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """Waits as the response says, without holding anybody up, or in some other way."""
    word, _, rest = response.partition(" ")
    if word == "work":  # and keeps the others from beginning
        time.sleep(0.03)
    if word in ("hang", "work"):
        await asyncio.Event().wait()
    if word == "cling":
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                continue
    if word == "block":
        time.sleep(1000)
    if word == "exit":
        os._exit(4)
    if word == "raise":
        raise KeyError(rest)
    await asyncio.sleep(0.05)
    return 1.0


def of_episode(
    response: str, answer: str, row: Mapping[str, Any], *, episode: Mapping[str, Any] | None
) -> float:
    """How many calls it had; -1 where it is none."""
    return -1.0 if episode is None else float(sum(len(turn["calls"]) for turn in episode["turns"]))


async def of_episode_later(
    response: str,
    answer: str,
    row: Mapping[str, Any],
    share: float,
    episode: Mapping[str, Any] | None = None,
) -> float:
    await asyncio.sleep(0)
    return share * of_episode(response, answer, row, episode=episode)


class Judge:
    """One with a state, whose instance is called."""

    async def __call__(self, response: str, answer: str, row: Mapping[str, Any]) -> float:
        return float(response == answer)


judge = Judge()
