"""A reward worker that others kill or stop costs no reward: what it had is computed by another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.isolation import pool
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.types import UserError
from megarl.types.reward_result import Failure, RewardResult

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("odd_rewards")]

RIGHT = RewardResult(1.0, True)
Build = Callable[..., RewardWorkers]
# The first process that gets the response "wait" waits for ever; the row says where each tells its id.
_PLAIN = """
import os, pathlib, time
def score(response, answer, row):
    if response == "wait":
        told = pathlib.Path(row["told"])
        with told.open("a") as file:
            print(os.getpid(), file=file)
        while len(set(told.read_text().split())) == 1:
            time.sleep(0.01)
    return 1.0
"""
_ASYNC = _PLAIN.replace("import os", "import asyncio, os").replace("def score", "async def score")
_ASYNC = _ASYNC.replace("time.sleep", "await asyncio.sleep")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the ids of processes; the functions are `plain_wait:score` and `async_wait:score`."""
    (tmp_path / "plain_wait.py").write_text(_PLAIN)
    (tmp_path / "async_wait.py").write_text(_ASYNC)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "told"


async def pids_told(told: Path, number: int) -> list[int]:
    """The ids, once so many responses wait."""
    while not told.exists() or len(told.read_text().splitlines()) < number:
        await asyncio.sleep(0.01)
    return [int(line) for line in told.read_text().split()]


def while_it_waits(
    workers: RewardWorkers, told: Path, responses: list[str], do: Callable[[int], Any]
) -> list[RewardResult | Failure]:
    """The rewards, with `do` called on the process in which the responses "wait" wait."""

    async def scenario() -> list[RewardResult | Failure]:
        scoring: Awaitable[Any] = asyncio.ensure_future(
            workers.reward_results("7", {"told": str(told)}, responses)
        )
        (pid,) = set(await pids_told(told, responses.count("wait")))
        do(pid)
        return await scoring

    return asyncio.run(scenario())


def number_of(name: signal.Signals) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, name)


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_what_a_killed_or_stopped_worker_had_is_done_again(
    judges: Build, told: Path, monkeypatch: pytest.MonkeyPatch, name: signal.Signals
) -> None:
    """Long before the time of the reward is over."""
    monkeypatch.setattr(pool, "_LOOK_S", 0.05)
    workers = judges("plain_wait:score", workers=1, timeout_s=1000.0)
    results = while_it_waits(workers, told, ["a", "wait", "b"], number_of(name))
    assert results == [RIGHT] * 3
    faults = workers.take_faults()
    assert (faults.ended, faults.services) == (1, ())
    assert not workers.take_faults()


def test_many_that_were_with_a_killed_worker_are_done_again_together(
    judges: Build, told: Path
) -> None:
    """One at a time they would take as long as all their judge's answers in a row."""
    workers = judges("async_wait:score", workers=1, timeout_s=1000.0)
    results = while_it_waits(workers, told, ["wait"] * 20, number_of(signal.SIGKILL))
    assert results == [RIGHT] * 20
    first, second = dict.fromkeys(told.read_text().split())
    assert told.read_text().split() == [first] * 20 + [second] * 20


def test_a_stopped_worker_without_work_is_replaced(
    judges: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOOK_S", 0.05)
    workers = judges("odd_rewards:score", workers=1, timeout_s=1000.0)
    (before,) = workers.pids()
    os.kill(before, signal.SIGSTOP)
    assert workers.wait_for_rewards("7", {}, ["7"]) == [RIGHT]
    assert workers.pids() != [before]


def test_a_function_that_ends_its_process_again_and_again_is_to_blame(
    judges: Build, told: Path
) -> None:
    (told.parent / "kills.py").write_text(
        "import os, pathlib, signal\n"
        "def score(response, answer, row):\n"
        "    with pathlib.Path(row['told']).open('a') as file: print(os.getpid(), file=file)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    workers = judges("kills:score", workers=1)
    (result,) = workers.wait_for_rewards("7", {"told": str(told)}, ["7"])
    assert result == Failure("ended its process (killed by SIGKILL)")
    assert len(told.read_text().split()) == 2


@pytest.mark.parametrize("refusals", [2, 1000])
def test_a_process_that_cannot_be_started_is_tried_again(
    judges: Build, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Where the machine has no room for a while; where it has none, the run ends."""
    monkeypatch.setattr(pool, "_FIRST_START_WAIT_S", 0.01)
    workers = judges("odd_rewards:score", workers=1)
    start: Any = subprocess.Popen
    left = refusals

    def refuse(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse)
    if refusals == 2:
        results = workers.wait_for_rewards("7", {}, ["exit 3", "7"])
        assert results == [Failure("ended its process (exit code 3)"), RIGHT]
    else:
        with pytest.raises(UserError, match="reward.workers: a process cannot be started"):
            workers.wait_for_rewards("7", {}, ["exit 3", "7"])


def test_a_worker_that_is_killed_while_the_run_starts_is_replaced(
    judges: Build, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_FIRST_START_WAIT_S", 0.01)
    (told.parent / "once.py").write_text(
        "import os, pathlib, signal\n"
        f"once = pathlib.Path({str(told)!r})\n"
        "if not once.exists():\n"
        "    once.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(response, answer, row): return 1.0\n"
    )
    assert judges("once:score", workers=1).wait_for_rewards("7", {}, ["7"]) == [RIGHT]
