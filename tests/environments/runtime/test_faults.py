"""Processes of tools that others end, and services that tools call: what the model is told, and what is counted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.isolation import pool
from tests.environments.runtime.conftest import told
from tests.http_server import Handler, serving

Play = Callable[..., Any]
# Each tool and method waits in the first process that runs it, until that process is ended.
_WAITING = """
import asyncio, os, pathlib, time
from megarl.environments import Environment

def _is_first(told):
    file = pathlib.Path(told)
    with file.open("a") as writer:
        print(os.getpid(), file=writer)
    return len(set(file.read_text().split())) == 1

def plain(name: str, *, told: str) -> str:
    \"\"\"Wait.\"\"\"
    if _is_first(told):
        time.sleep(1000)
    return name

async def patient(name: str, *, told: str) -> str:
    \"\"\"Wait.\"\"\"
    if _is_first(told):
        await asyncio.sleep(1000)
    return name

class Sum(Environment):
    def __init__(self, told: str) -> None:
        self._told = told
        self._sum = 0

    def add(self, number: int) -> str:
        \"\"\"Add a number.\"\"\"
        self._sum += number
        return str(self._sum)

    def last(self, number: int) -> str:
        \"\"\"Add a number, after waiting.\"\"\"
        if _is_first(self._told):
            time.sleep(1000)
        return self.add(number)
"""
_ASKING = """
import urllib.error, urllib.request
from megarl.environments import Service, Unavailable

SEARCH = Service("search", timeout_s=1.0)

def look(word: str, *, url: str) -> str:
    \"\"\"Look a word up.\"\"\"
    def send(left_s: float) -> str:
        with urllib.request.urlopen(url, data=b"{}", timeout=left_s) as reply:
            return reply.read().decode()
    return SEARCH.call_plain(send)
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that tells the processes of `waiting:...`."""
    (tmp_path / "waiting.py").write_text(_WAITING)
    (tmp_path / "asking.py").write_text(_ASKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "told"


async def waiting(written: Path, number: int) -> int:
    """The process in which so many calls wait."""
    while not written.exists() or len(written.read_text().splitlines()) < number:
        await asyncio.sleep(0.01)
    (pid,) = set(written.read_text().split())
    return int(pid)


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("tool", ["plain", "patient"])
def test_calls_of_a_process_that_others_end_are_made_again(
    play: Play, written: Path, monkeypatch: pytest.MonkeyPatch, tool: str, name: signal.Signals
) -> None:
    """The model is told what it would have been told."""
    monkeypatch.setattr(pool, "_LOOK_S", 0.05)
    at_once = 1 if tool == "plain" else 5

    async def scenario(tested: EnvironmentThread) -> None:
        await tested.open("a", {}, 0)
        calls = [(tool, {"name": str(number)}) for number in range(5)]
        calling = asyncio.ensure_future(tested.call("a", calls))
        os.kill(await waiting(written, at_once), name)
        assert told(await calling) == [(str(number), None) for number in range(5)]
        assert tested.take_faults().ended == 1
        assert not tested.take_faults()

    arguments = {"told": str(written)}
    play(scenario, tools=(f"waiting:{tool}",), arguments=arguments, call_timeout_s=1000.0)


def test_an_instance_whose_process_others_end_has_its_state_again(
    play: Play, written: Path
) -> None:
    async def scenario(tested: EnvironmentThread) -> None:
        await tested.open("a", {}, 0)
        assert told(await tested.call("a", [("add", {"number": 3})])) == [("3", None)]
        calling = asyncio.ensure_future(tested.call("a", [("last", {"number": 4})]))
        os.kill(await waiting(written, 1), signal.SIGKILL)
        assert told(await calling) == [("7", None)]
        await tested.finish("a")

    play(
        scenario,
        environment="waiting:Sum",
        arguments={"told": str(written)},
        call_timeout_s=1000.0,
    )


@pytest.mark.slow
def test_a_search_that_hangs_costs_its_own_calls_and_is_counted(play: Play, written: Path) -> None:
    """The process goes on; when the search is back, its answers are told again."""
    hang = asyncio.Event()
    asked = 0

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal asked
        asked += 1
        handler.send(503 if not hang.is_set() else 200, b"found")

    async def scenario(tested: EnvironmentThread) -> None:
        await tested.open("a", {}, 0)
        before = tested.pids()
        texts = set()
        for _ in range(100):
            (result,) = await tested.call("a", [("look", {"word": "x"})])
            assert result.error == "raised"
            texts.add(result.text.partition(" (")[0])
        assert any("ServiceError: search has not answered for" in text for text in texts)
        assert asked < 30
        (faults,) = tested.take_faults().services
        assert (faults.service, faults.lost, faults.outages) == ("search", 100, 1)
        hang.set()
        results = []
        while not results or results[-1] != ("found", None):
            results += told(await tested.call("a", [("look", {"word": "x"})]))
        (faults,) = tested.take_faults().services
        assert (faults.recoveries, faults.lost) == (1, len(results) - 1)
        assert tested.pids() == before and not tested.take_faults()

    with serving(answer) as url:
        play(scenario, tools=("asking:look",), arguments={"url": url})
