"""Tools and environments that do what none should, as their arguments say."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.environments import Environment, Observation, RewardResult

_kept: list[Any] = []


def _sockets() -> list[int]:
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                descriptors.append(int(name))
        except OSError:  # of the listing itself
            continue
    return descriptors


def misbehave(what: str) -> Any:
    """Do what the first word says."""
    word, _, rest = what.partition(" ")
    match word:
        case "hang":
            while True:
                time.sleep(100)
        case "loop":
            while True:
                pass
        case "deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(100)
        case "fill":
            while True:
                _kept.append(bytes(16 * 2**20))
        case "exit":
            os._exit(int(rest))
        case "segfault":
            ctypes.string_at(0)
        case "signal":
            os.kill(os.getpid(), int(rest))
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError(rest)
        case "exit_politely":
            raise SystemExit(3)
        case "recurse":
            return misbehave(what)
        case "flood":
            return "x" * int(rest)
        case "nothing":
            return None
        case "number":
            return 7
        case "object":
            return object()
        case "garbage":
            for number in _sockets():
                os.write(number, f"{rest}\n".encode())
            time.sleep(100)
        case "close":
            os.closerange(3, 4096)
            time.sleep(100)
        case "shut":
            for number in _sockets():
                socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_WR)
            time.sleep(100)
        case "print":
            print('[0, "none"]')
            os.write(1, b'[0, "none"]\n')
            return sys.stdin.read() + "printed"
        case "surrogate":
            return "\ud800" + rest
    return what


def work(what: str) -> Any:
    """Echo the text, or misbehave."""
    return misbehave(what)


def worth(text: str, reward: Any, *, done: bool = False, extra: str = "") -> Observation:
    """An observation with a reward, which may be anything."""
    return Observation(text + extra, reward, done)


def process(text: str) -> str:
    """The process that runs this."""
    return f"{text} {os.getpid()}"


def variables(*, key_env: str = "") -> list[str]:
    """The names of the environment variables."""
    return sorted(os.environ)


def count_to_file(path: str) -> str:
    """Append a line to a file, then end the process if it is the first one."""
    with open(path, "a") as file:
        file.write("x\n")
    if len(Path(path).read_text().splitlines()) == 1:
        os._exit(4)
    return "counted"


async def patient(what: str) -> Any:
    """Echo after a moment, without holding anybody up, or in another way."""
    word, _, rest = what.partition(" ")
    if word == "wait":
        await asyncio.Event().wait()
    if word == "block":
        if rest:
            Path(rest).touch()
        time.sleep(1000)
    if word == "cling":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
    if word == "subtask":
        await asyncio.gather(asyncio.create_task(patient("exit_politely")))
    if word == "sleep":
        await asyncio.sleep(float(rest))
        return what
    return misbehave(what)


_arrived: list[str] = []


async def meet(name: str, num: int) -> str:
    """Wait until as many others have come."""
    _arrived.append(name)
    while len(_arrived) < num:
        await asyncio.sleep(0)
    return name


async def place() -> int:
    """The process that it runs in."""
    return os.getpid()


class Counter(Environment):
    """A sum and random numbers, which a replay must make again; `misbehave` beside it."""

    def __init__(self, start: int = 0, closed: str | None = None) -> None:
        self._sum, self._random, self._closed = start, random.Random(self.seed), closed
        self._row: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self._row = row
        if row.get("reset"):
            return misbehave(row["reset"])
        return f"You have {self._sum}." if row.get("told") else None

    def add(self, number: int) -> str:
        """Add a number to the sum."""
        self._sum += number
        return str(self._sum)

    def draw(self) -> int:
        """A random number."""
        return self._random.randrange(10**9)

    def where(self) -> str:
        """The process, which is not what a replay should return."""
        return str(os.getpid())

    def odd(self, what: str) -> Any:
        """Misbehave after adding a thousand."""
        self._sum += 1000
        return misbehave(what)

    async def slow(self, what: str) -> Any:
        """Wait, or misbehave in the event loop."""
        return await patient(what)

    async def lose(self, what: str) -> Any:
        """Begin with losing the sum."""
        self._sum = -1
        return await patient(what)

    def reply(self, text: str) -> str | Observation | None:
        if text == "end":
            return None
        return Observation(misbehave(text), float(self._sum), done=self._sum > 10)

    def reward(self) -> Any:
        if "reward" in self._row:
            return misbehave(self._row["reward"])
        return RewardResult(float(self._sum), self._sum > 10)

    def close(self) -> None:
        if self._closed:
            with open(self._closed, "a") as file:
                file.write(f"{self._row.get('name')}\n")
        if self._row.get("close"):
            misbehave(self._row["close"])


class Unrepeatable(Counter):
    """The same, whose calls cannot be repeated."""

    replayable = False


class Gentle(Environment):
    """All of it `async def`."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return "begun"

    async def reply(self, text: str) -> str | None:
        await asyncio.sleep(0)
        return text

    async def reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def close(self) -> None:
        await asyncio.sleep(0)
