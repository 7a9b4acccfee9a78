"""An agent that does what its row says, also what no agent should."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from megarl.environments import Chat, EpisodeOver, RewardResult

_kept: list[Any] = []
prepared: list[Any] = []


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


def _write_to_sockets(text: str) -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                socket.socket(fileno=os.dup(int(name))).sendall(f"{text}\n".encode())
        except OSError:  # of the listing itself, or of an event loop
            continue


async def run(chat: Chat, row: Mapping[str, Any], worth: float = 1.0) -> Any:
    """Do what the row's `do` names, with its other values."""
    if row.get("ask_first"):
        await chat(user("first"))
    if row.get("begun"):
        with open(row["begun"], "a") as file:
            file.write(f"{os.getpid()}\n")
    return await globals()[f"_{row['do']}"](chat, row, worth)


run.prepare = lambda worth=1.0: prepared.append(worth)  # type: ignore[attr-defined]


async def _play(chat: Chat, row: Mapping[str, Any], worth: float) -> RewardResult:
    messages = [*chat.prompt, *user(row["say"])]
    chat.prompt.clear()
    for _ in range(2):
        message = await chat(messages, row.get("tools"))
        messages += [message, *user("again")]
    words = [message["content"] for message in messages]
    details = [*words, chat.seed, chat.url, chat.key, chat.socket, len(chat.prompt), prepared]
    return RewardResult(worth, True, repr(details))


async def _return(chat: Chat, row: Mapping[str, Any], worth: float) -> Any:
    values = {
        "none": None,
        "object": object(),
        "nan": float("nan"),
        "text": "1",
        "int": 1,
        "true": True,
    }
    return values[row["value"]]


async def _raise(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    if row["error"] == "task_exit":
        asyncio.get_running_loop().create_task(_raise(chat, {"error": "exit"}, worth))
        await asyncio.Event().wait()
    raise {"key": KeyError("x"), "exit": SystemExit(3), "cancelled": asyncio.CancelledError()}[
        row["error"]
    ]


async def _together(chat: Chat, row: Mapping[str, Any], worth: float) -> RewardResult:
    """Sub-agents that need each other's requests to be open."""

    async def sub(name: str) -> str:
        return (await chat(user(name)))["content"]

    return RewardResult(0.5, False, " ".join(await asyncio.gather(*map(sub, row["names"]))))


async def _hang(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    await asyncio.Event().wait()


async def _cling(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


async def _sleep(chat: Chat, row: Mapping[str, Any], worth: float) -> float:
    time.sleep(row["seconds"])
    return worth


async def _loop(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    while True:
        pass


async def _hold(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    """Let no other Python code of the process run."""
    sys.setswitchinterval(10000)
    while True:
        pass


async def _wait(chat: Chat, row: Mapping[str, Any], worth: float) -> int:
    """Block the thread until a file is there; then ask, and return the process."""
    wait_for(row["until"])
    await chat(user("then"))
    return os.getpid()


async def _where(chat: Chat, row: Mapping[str, Any], worth: float) -> int:
    return os.getpid()


async def _fill(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    while True:
        _kept.append(bytes(4 * 2**20))


async def _exit(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    os._exit(7)


async def _exit_once(chat: Chat, row: Mapping[str, Any], worth: float) -> float:
    if not Path(row["once"]).exists():
        Path(row["once"]).touch()
        os._exit(7)
    return worth


async def _exit_when(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    wait_for(row["until"])
    os._exit(7)


async def _garbage(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    _write_to_sockets(row["text"])
    await asyncio.Event().wait()


async def _print(chat: Chat, row: Mapping[str, Any], worth: float) -> float:
    print("an agent has printed this, and read:", repr(sys.stdin.read()))
    return worth


async def _refused(chat: Chat, row: Mapping[str, Any], worth: float) -> RewardResult:
    """The words of every request that cannot be answered, and that of one that can."""
    circle: list[Any] = []
    circle.append(circle)
    words = []
    contents: list[Any] = [circle, "\ud800", float("nan"), object(), "x" * 2**24]
    bad = ["text", [1], *(user(content) for content in contents)]
    for messages in [*bad, user("refuse")]:
        try:
            await chat(messages)  # type: ignore[arg-type]
        except ValueError as error:
            words.append(str(error))
    words.append((await chat(user("\x00\u2028" * 1000)))["content"][:5])
    return RewardResult(0.0, False, "|".join(words))


async def _over(chat: Chat, row: Mapping[str, Any], worth: float) -> RewardResult:
    """Ask again and again after the end."""
    words = []
    for _ in range(3):
        try:
            await chat(user("over"))
        except EpisodeOver as error:
            words.append(str(error))
    return RewardResult(worth, True, "|".join(words))


async def _let_over_pass(chat: Chat, row: Mapping[str, Any], worth: float) -> float:
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(chat(user("over")))
    return worth


async def _fail_when_over(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    """Take the end for a fault, as a program does that knows of no limits."""
    for _ in range(100):
        try:
            await chat(user("over"))
        except EpisodeOver as error:
            raise KeyError("choices") from error


async def _ask_for_ever(chat: Chat, row: Mapping[str, Any], worth: float) -> None:
    while True:
        try:
            await chat(user("over"))
        except EpisodeOver:
            continue


async def _impatient(chat: Chat, row: Mapping[str, Any], worth: float) -> float:
    """Cancel a request, and leave another."""
    request = asyncio.create_task(chat(user("never")))
    await chat(user("when_open"))
    request.cancel()
    await chat(user("when_cancelled"))
    _kept.append(asyncio.create_task(chat(user("never"))))
    await chat(user("when_open"))
    return worth


async def _in_threads(chat: Chat, row: Mapping[str, Any], worth: float) -> RewardResult:
    """Plain code in a thread that asks in a loop of its own."""

    def plain() -> str:
        return asyncio.run(chat(user("deep")))["content"]

    return RewardResult(worth, True, await asyncio.to_thread(plain))


async def _leave(chat: Chat, row: Mapping[str, Any], worth: float) -> int:
    """Leave a thread behind that does not end."""
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    return os.getpid()


def plain(chat: Chat, row: Mapping[str, Any]) -> float:
    return 1.0


async def generates(chat: Chat, row: Mapping[str, Any]) -> AsyncIterator[float]:
    yield 1.0


async def takes_nothing() -> float:
    return 1.0


async def needs(chat: Chat, row: Mapping[str, Any], *, tools: int) -> float:
    return float(tools)


class Callable:
    async def __call__(self, chat: Chat, row: Mapping[str, Any], worth: float = 1.0) -> float:
        return worth

    async def method(self, chat: Chat, row: Mapping[str, Any]) -> float:
        return 1.0


called = Callable()


async def unprepared(chat: Chat, row: Mapping[str, Any]) -> float:
    return 1.0


def _no_disk() -> None:
    raise OSError("no disk")


unprepared.prepare = _no_disk  # type: ignore[attr-defined]
