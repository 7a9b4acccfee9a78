"""Episodes that go on in another instance: what was done is done again, and comes to the same or is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import RewardResult
from megarl.environments.runtime.environment_processes import JobFailure
from megarl.environments.runtime.environment_thread import EnvironmentThread, ReplayFailure
from megarl.environments.runtime.history import from_json, to_json
from megarl.environments.runtime.results import CallResult
from megarl.timeline import recorder
from tests.environments.runtime.conftest import add

Play = Callable[..., Any]
COUNTER, UNREPEATABLE = "odd_tools:Counter", "odd_tools:Unrepeatable"
ROW = {"told": True, "name": "one"}
LATE = "lose took longer than 1 s."


async def texts(pool: EnvironmentThread, episode: str, *calls: tuple[str, Any]) -> list[str]:
    return [result.text for result in await pool.call(episode, calls)]


def test_an_episode_goes_on_in_another_process_as_if_nothing_had_been(play: Play) -> None:
    """Random numbers, replies and calls that failed included; a call that was given up leaves no trace."""

    async def scenario(pool: EnvironmentThread) -> None:
        for name in ("whole", "left"):
            await pool.open(name, ROW, 5)
            await pool.call(name, [add(2), ("draw", {}), ("add", {"figure": 3}), ("nothing", {})])
            await pool.reply(name, "hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.call("left", [add(5), ("slow", {"what": "wait"})])
        history = await pool.leave("left", 3)
        assert isinstance(json.loads(history or ""), list)
        assert await pool.resume("again", ROW, 5, history) == 3
        assert await texts(pool, "again", add(7), ("draw", {})) == await texts(
            pool, "whole", add(7), ("draw", {})
        )
        left = await pool.leave("again", 4)
        assert await pool.resume("again", ROW, 5, left) == 4, (
            "the name is free, and what it went on with is in it"
        )
        assert await texts(pool, "again", add(1)) == ["10"]
        assert await pool.finish("again") == RewardResult(10.0, False)

    play(scenario, environment=COUNTER, workers=2)


def test_each_call_that_began_is_in_the_timeline_whatever_its_end(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for name in "abc":
            await pool.open(name, {"name": "one"}, 0)
        await pool.call("a", [add(2)])
        await pool.call("b", [("lose", {"what": "wait"})])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await pool.call("c", [("slow", {"what": "wait"})])

    recorder.begin()
    try:
        play(scenario, environment=COUNTER, call_timeout_s=1.0)
    finally:
        recording = recorder.end()
    assert recording is not None
    seconds = {span.name: (span.end_ns - span.begin_ns) / 1e9 for span in recording.spans}
    assert seconds["add"] < seconds["lose"]
    assert seconds["lose"] >= 1.0
    assert seconds["slow"] > 0.0


def test_a_call_that_was_cut_leaves_no_trace(play: Play, tmp_path: Path) -> None:
    """Neither in this instance, which is closed and replaced, nor in one that goes on with the episode later."""

    async def scenario(pool: EnvironmentThread) -> None:
        row = {"name": "one"}
        await pool.open("a", row, 0)
        lose = "lose", {"what": "wait"}
        assert await texts(pool, "a", lose, ("slow", {"what": "sleep 0"})) == [LATE, "sleep 0"]
        history = await pool.leave("a", 2)
        assert await pool.resume("b", row, 0, history) == 2
        assert await texts(pool, "b", add(5)) == ["5"]
        assert await texts(pool, "b", lose) == [LATE]
        assert await texts(pool, "b", add(0)) == ["5"]
        assert await texts(pool, "b", lose) == [LATE]
        assert await pool.finish("b") == RewardResult(5.0, False)
        assert pool.num_ended == 0
        assert (tmp_path / "closed").read_text() == "one\n" * 4

    play(
        scenario,
        environment=COUNTER,
        arguments={"closed": str(tmp_path / "closed")},
        call_timeout_s=1.0,
    )


def test_a_call_that_was_given_up_leaves_no_trace_in_the_reward(play: Play) -> None:
    """Nor does a replay, which the next operation begins again."""

    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        await pool.call("a", [add(2), ("slow", {"what": "sleep 0.3"})])
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pool.call("a", [("lose", {"what": "wait"})])
        assert await pool.finish("a") == RewardResult(2.0, False)
        assert pool.num_ended == 0

    play(scenario, environment=COUNTER)


def test_what_does_not_come_to_the_same_is_refused(play: Play) -> None:
    """By its name, which is free afterwards."""

    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", ROW, 5)
        await pool.call("a", [("draw", {})])
        history = await pool.leave("a", 2)
        with pytest.raises(ReplayFailure, match="draw gave another result in the replay"):
            await pool.resume("a", ROW, 6, history)
        for nothing in (None, "[]", "[1", '[[[["open"], {"colour": 1}]]]'):
            with pytest.raises(ReplayFailure):
                await pool.resume("a", ROW, 5, nothing)
        assert await pool.open("a", ROW, 5) == "You have 0."

    play(scenario, environment=COUNTER)


def test_what_cannot_be_repeated_is_not_resumed(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        assert not pool.is_replayable
        await pool.open("a", ROW, 5)
        history = await pool.leave("a", 1)
        assert history is None and await pool.leave("given up before it had begun", 0) is None
        with pytest.raises(ReplayFailure, match="it cannot be replayed"):
            await pool.resume("a", ROW, 5, history)

    play(scenario, environment=UNREPEATABLE)


def test_functions_have_no_state_to_make_again(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        await pool.call("a", [("process", {"text": "x"})])
        assert await pool.resume("b", {}, 0, await pool.leave("a", 1)) == 0
        assert (await pool.call("b", [("process", {"text": "x"})]))[0].error is None

    play(scenario, tools=("odd_tools:process",))


def test_a_history_is_read_as_it_was_written() -> None:
    """But for calls that the environment has not seen, and what cannot be written at all."""
    row, result = {"a": 1}, CallResult("t\u2713", 0.5, False, None, 0.25)
    unfit = ("call", "add", {"x": float("nan")}), JobFailure("arguments", "no")
    call = ("call", "add", {"x": [1, "\ud800"]})
    history = [
        {0: (("open", row, 3), None)},
        {1: (call, result), 0: unfit},
        {},
        {0: (("reply", "w"), None)},
    ]
    assert from_json(to_json(history) or "", row, 3) == [
        history[0],
        {0: (call, result)},
        {},
        history[3],
    ]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert to_json([{0: (("call", "add", {"x": deep}), result)}]) is None
