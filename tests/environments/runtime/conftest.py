"""Pools of real worker processes, none of which outlives its test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.environments.runtime.results import CallResult

Result = TypeVar("Result")
Play = Callable[..., Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """play(scenario, **settings): what the coroutine function makes of a pool that has been started.

    Whatever it does, afterwards none of the processes that were started is there.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(scenario: Callable[[EnvironmentThread], Awaitable[Result]], **settings: Any) -> Result:
        return asyncio.run(
            _played(scenario, EnvironmentSettings(**{"workers": 1, "start_s": 120.0, **settings}))
        )

    return run


def told(results: list[CallResult]) -> list[tuple[str, str | None]]:
    return [(result.text, result.error) for result in results]


def add(number: int) -> tuple[str, Mapping[str, Any]]:
    """A call of `odd_tools:Counter`."""
    return "add", {"number": number}


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _played(
    scenario: Callable[[EnvironmentThread], Awaitable[Result]], settings: EnvironmentSettings
) -> Result:
    before = set(psutil.Process().children(recursive=True))
    pool = EnvironmentThread(settings)
    try:
        async with asyncio.timeout(120):
            return await scenario(pool)
    finally:
        pids = pool.pids()
        pool.shutdown()
        assert not pool.pids()
        # What a tool has started is killed with it, and reaped by whoever inherits it: perhaps later, by this process.
        new = set(psutil.Process().children(recursive=True)) - before
        left = {process for process in new if process.pid in pids or is_alive(process)}
        assert not left, "every process is ended, and those of the pool are reaped"
