"""Agents that hang, die and fill the memory, in real processes: what they do costs others as little as can be."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.environments.agents.agent_thread import AgentFailure
from megarl.environments.agents.chat import Access
from megarl.types import UserError
from tests.environments.agents.conftest import Agents, Scripted

Build = Callable[..., Agents]
LATE = "took longer than 0.3 s"


async def outcome(run: Awaitable[Any]) -> Any:
    """The result of a run, or the words of its failure."""
    try:
        return await run
    except AgentFailure as failure:
        return str(failure)


class Waiting:
    """A run that blocks in its process until `release`, then asks the model and returns the process's id."""

    def __init__(self, agents: Agents, folder: Path, name: str, *, ask_first: bool) -> None:
        self._begun, self._until = folder / f"{name}-begun", folder / f"{name}-until"
        row = {"begun": str(self._begun), "until": str(self._until), "ask_first": ask_first}
        self.run = asyncio.create_task(outcome(agents.run("wait", **row)))

    async def begun(self) -> Waiting:
        while not self._begun.exists():
            await asyncio.sleep(0.005)
        return self

    async def released(self) -> Any:
        self._until.touch()
        return await self.run


async def gone(pid: float) -> None:
    async with asyncio.timeout(20):
        while psutil.pid_exists(int(pid)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("do", ["hang", "ask_for_ever"])
def test_an_agent_that_takes_too_long_is_cancelled(agents: Agents, do: str) -> None:
    async def scenario() -> None:
        before = agents.thread.pids()
        assert await outcome(agents.run(do, timeout_s=0.3)) == LATE
        assert agents.thread.pids() == before, "and its process goes on"

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_agent_that_blocks_holds_up_itself_alone(agents: Agents, tmp_path: Path) -> None:
    """It is cancelled when its time is over; its process ends with the runs that it still has."""

    async def scenario() -> None:
        (before,) = agents.thread.pids()
        waiting = await Waiting(agents, tmp_path, "a", ask_first=True).begun()
        stuck = [
            asyncio.create_task(outcome(agents.run(do, seconds=1000, timeout_s=0.5)))
            for do in ("loop", "sleep")
        ]
        stuck.append(asyncio.create_task(outcome(agents.run("cling", timeout_s=0.5))))
        for _ in range(3):
            assert await agents.run("where") == before
        assert await asyncio.gather(*stuck) == ["took longer than 0.5 s"] * 3
        assert await agents.run("where") not in (None, before), "new runs are in a new process"
        assert psutil.pid_exists(before)
        assert await waiting.released() == before
        await gone(before)

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_agent_that_stops_its_process_is_to_blame(agents: Agents, tmp_path: Path) -> None:
    async def scenario() -> None:
        (before,) = agents.thread.pids()
        asked = await Waiting(agents, tmp_path, "a", ask_first=True).begun()
        unasked = await Waiting(agents, tmp_path, "b", ask_first=False).begun()
        assert await outcome(agents.run("hold", timeout_s=0.3)) == LATE
        assert await asked.run == f"its process was ended because another agent {LATE}"
        assert await unasked.released() not in (None, before), "it had not asked, and begins anew"

    asyncio.run(scenario())


def test_a_full_memory_costs_the_one_that_fills_it(agents: Agents, tmp_path: Path) -> None:
    """It has not asked, and could be innocent: it begins anew, in another process."""

    async def scenario() -> None:
        waiting = await Waiting(agents, tmp_path, "a", ask_first=True).begun()
        begun = tmp_path / "fill"
        assert await outcome(agents.run("fill", begun=str(begun))) == "ran out of memory"
        first, second = map(int, begun.read_text().split())
        assert first != second and await waiting.released() == first, "and the other goes on"

    asyncio.run(scenario())


def test_an_agent_that_has_the_endpoint_does_not_begin_anew(agents: Agents, tmp_path: Path) -> None:
    """It may have asked there. The other agent has not asked, and then ends another process alone."""

    async def scenario() -> None:
        row = {"do": "hang", "begun": str(tmp_path / "begun")}
        access = Access("http://127.0.0.1:1/v1", "secret", "/tmp/socket")
        other = asyncio.create_task(
            outcome(agents.thread.run(row, [], 0, Scripted(), access, 60.0))
        )
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.005)
        assert await outcome(agents.run("exit")) == "ended its process (exit code 7)"
        assert (
            await other
            == "its process was ended because it or another agent ended its process (exit code 7)"
        )

    asyncio.run(scenario())


@pytest.mark.slow
def test_runs_that_lose_their_process_begin_anew_before_they_have_asked(
    agents: Agents, tmp_path: Path
) -> None:
    words = "its process was ended because it or another agent ended its process (exit code 7)"

    async def scenario() -> None:
        asked = await Waiting(agents, tmp_path, "a", ask_first=True).begun()
        unasked = await Waiting(agents, tmp_path, "b", ask_first=False).begun()
        assert await outcome(agents.run("exit", ask_first=True)) == words
        assert await asked.run == words
        assert await outcome(agents.run("exit_once", once=str(tmp_path / "once"))) == 0.25
        alone = await outcome(agents.run("exit"))
        assert alone == "ended its process (exit code 7)", "it has begun anew, and is to blame"
        assert await unasked.run == words, (
            "it has begun three times, and each time its process was ended"
        )

    asyncio.run(scenario())


def test_a_run_whose_process_others_kill_begins_anew_before_it_has_asked(
    agents: Agents, tmp_path: Path
) -> None:
    async def scenario() -> None:
        (before,) = agents.thread.pids()
        agents.thread.take_faults()
        unasked = await Waiting(agents, tmp_path, "a", ask_first=False).begun()
        os.kill(before, signal.SIGKILL)
        assert await unasked.released() not in (None, before)
        # it may be counted only after the run that begins anew has ended
        num_ended = 0
        async with asyncio.timeout(30.0):
            while not num_ended:
                num_ended = agents.thread.take_faults().ended
                await asyncio.sleep(0.01)
        assert num_ended == 1
        (before,) = agents.thread.pids()
        asked = await Waiting(agents, tmp_path, "b", ask_first=True).begun()
        os.kill(before, signal.SIGKILL)
        assert "ended its process (killed by SIGKILL)" in await asked.run

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ['[1, "end"]', "x" * 20_000_000])
def test_what_is_no_message_ends_the_process(agents: Agents, text: str) -> None:
    assert (
        asyncio.run(outcome(agents.run("garbage", text=text)))
        == "wrote to the socket of its worker process"
    )


def test_work_that_is_left_behind_ends_with_the_process(agents: Agents) -> None:
    async def scenario() -> None:
        before = await agents.run("leave")
        assert await agents.run("where") not in (None, before)
        await gone(before)

    asyncio.run(scenario())


def test_runs_are_dealt_to_the_process_with_the_fewest(build: Build, tmp_path: Path) -> None:
    """And who waits at the end is cancelled."""

    async def scenario() -> None:
        agents = build(workers=2)
        runs = [
            await Waiting(agents, tmp_path, str(number), ask_first=False).begun()
            for number in range(4)
        ]
        assert {await runs[0].released(), await runs[1].released()} == set(agents.thread.pids())
        deaf = asyncio.create_task(agents.run("loop"))
        await asyncio.to_thread(agents.thread.shutdown)
        errors = await asyncio.gather(runs[2].run, runs[3].run, deaf, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in errors)

    asyncio.run(scenario())


def test_what_cannot_be_used_is_an_error(build: Build) -> None:
    with pytest.raises(UserError) as caught:
        build("odd_agents:plain")
    assert str(caught.value).startswith(
        "episode.agent: odd_agents:plain is not an async def function"
    )


def test_an_agent_that_can_no_longer_be_imported_is_an_error(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once.py").write_text("import os\nasync def run(chat, row):\n    os._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario() -> None:
        agents = build("once:run")
        (tmp_path / "once.py").write_text("raise OSError('no disk')\n")
        assert await outcome(agents.run("")) == "ended its process (exit code 1)"
        with pytest.raises(UserError, match="OSError: no disk"):
            await agents.run("")

    asyncio.run(scenario())
