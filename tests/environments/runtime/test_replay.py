"""Environments in real worker processes: an episode keeps its state whatever other episodes do, or fails by name."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import RewardResult
from megarl.environments.runtime.environment_thread import (
    EnvironmentFailure,
    EnvironmentThread,
)
from tests.environments.runtime.conftest import add, told

Play = Callable[..., Any]
COUNTER, UNREPEATABLE = "odd_tools:Counter", "odd_tools:Unrepeatable"


def odd(what: str) -> tuple[str, Mapping[str, Any]]:
    return "odd", {"what": what}


async def kill_idle(pool: EnvironmentThread) -> None:
    """As others do, until the pool has another process."""
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    while pool.pids() == [pid]:
        await asyncio.sleep(0.01)


async def one(
    pool: EnvironmentThread, episode: str, call: tuple[str, Any]
) -> tuple[str, str | None]:
    return told(await pool.call(episode, [call]))[0]


def test_an_episode_has_an_instance_with_its_seed(play: Play, tmp_path: Path) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        assert await pool.open("a", {"told": True, "name": "first"}, 5) == "You have 3."
        assert await pool.open("b", {"name": "second"}, 5) is None
        for episode in "ab":
            assert told(await pool.call(episode, [add(1), add(2)])) == [("4", None), ("6", None)]
            assert await one(pool, episode, ("draw", {})) == (
                str(random.Random(5).randrange(10**9)),
                None,
            )
        for hidden in ("reset", "reward", "_sum", "close"):
            assert (await one(pool, "a", (hidden, {})))[1] == "unknown"
        answer = await pool.reply("a", "well")
        assert answer and (answer.text, answer.reward, answer.done, answer.error) == (
            "well",
            6.0,
            False,
            None,
        )
        assert await pool.reply("b", "end") is None
        assert await pool.finish("a") == RewardResult(6.0, False)
        await pool.finish("b")
        assert (tmp_path / "closed").read_text() == "first\nsecond\n"
        assert pool.num_ended == 0

    play(scenario, environment=COUNTER, arguments={"start": 3, "closed": str(tmp_path / "closed")})


def test_all_of_an_environment_may_be_async(play: Play) -> None:
    async def episode(pool: EnvironmentThread, name: str) -> None:
        assert await pool.open(name, {}, 0) == "begun"
        answer = await pool.reply(name, name)
        assert answer and answer.text == name
        assert await pool.finish(name) == RewardResult(0.5, False)

    async def scenario(pool: EnvironmentThread) -> None:
        assert pool.has_reply
        await asyncio.gather(*(episode(pool, str(number)) for number in range(50)))

    play(scenario, environment="odd_tools:Gentle", workers=2)


@pytest.mark.parametrize(
    "what",
    [
        "exit 3",
        pytest.param("fill", marks=pytest.mark.slow),
        pytest.param("hang", marks=pytest.mark.slow),
    ],
)
def test_other_episodes_of_an_ended_process_go_on(play: Play, what: str) -> None:
    """They draw the same random numbers as without it, and the guilty one goes on from before its call."""
    error = {"exit 3": "ended", "fill": "memory", "hang": "timeout"}[what]

    async def episode(pool: EnvironmentThread, number: int) -> list[Any]:
        name = str(number)
        await pool.open(name, {"told": True}, number)
        results = told(await pool.call(name, [add(number), ("draw", {})]))
        middle = odd(what) if number == 3 else add(1)
        results += told(await pool.call(name, [middle, ("draw", {})]))
        return [*results, await pool.finish(name)]

    async def scenario(pool: EnvironmentThread) -> None:
        episodes = await asyncio.gather(*(episode(pool, number) for number in range(8)))
        for number, results in enumerate(episodes):
            dice, total = random.Random(number), number + (number != 3)
            draws = [(str(dice.randrange(10**9)), None) for _ in range(2)]
            assert results[:2] == [(str(number), None), draws[0]]
            assert results[2][1] == (error if number == 3 else None)
            assert results[3:] == [draws[1], RewardResult(float(total), False)]
        assert pool.num_ended == 1
        assert len(pool.pids()) == 1

    play(
        scenario, environment=COUNTER, call_timeout_s=1.5 if what == "hang" else 60.0, memory_mb=200
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "exit 3"])
def test_it_is_found_out_which_async_call_is_to_blame(play: Play, what: str) -> None:
    async def episode(pool: EnvironmentThread, number: int) -> list[Any]:
        name = str(number)
        await pool.open(name, {}, number)
        results = told(await pool.call(name, [add(number), ("draw", {})]))
        results += told(
            await pool.call(name, [("slow", {"what": what if number == 3 else "sleep 0.05"})])
        )
        return [*results, *told(await pool.call(name, [("draw", {})])), await pool.finish(name)]

    async def scenario(pool: EnvironmentThread) -> None:
        episodes = await asyncio.gather(*(episode(pool, number) for number in range(8)))
        for number, results in enumerate(episodes):
            dice = random.Random(number)
            draws = [(str(dice.randrange(10**9)), None) for _ in range(2)]
            error = "ended" if what == "exit 3" else "timeout"
            assert results[:2] == [(str(number), None), draws[0]]
            assert results[2] == ("sleep 0.05", None) if number != 3 else results[2][1] == error
            assert results[3:] == [draws[1], RewardResult(float(number), False)]

    play(scenario, environment=COUNTER, call_timeout_s=1.5)


def test_an_idle_episode_is_replayed_when_it_goes_on(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {"told": True}, 0)
        for number in range(5):
            assert await one(pool, "a", add(number)) == (str(sum(range(number + 1))), None)
        assert await one(pool, "a", odd("raise no")) == ("ValueError: no", "raised")
        await pool.reply("a", "well")
        await kill_idle(pool)
        assert await one(pool, "a", add(0)) == ("1010", None)
        assert pool.num_ended == 1
        assert await pool.finish("a") == RewardResult(1010.0, True)

    play(scenario, environment=COUNTER)


def test_a_restart_ends_every_process_and_loses_no_episode(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for number, episode in enumerate("abc"):
            await pool.open(episode, {}, 0)
            await pool.call(episode, [add(number)])
        before = pool.pids()
        await pool.restart()
        assert not {*before} & {*pool.pids()} and len(pool.pids()) == 2
        assert [await one(pool, episode, add(1)) for episode in "abc"] == [
            (str(n), None) for n in (1, 2, 3)
        ]
        assert pool.num_ended == 2

    play(scenario, environment=COUNTER, workers=2)


def test_another_outcome_in_the_replay_is_a_failure(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for episode in "ab":
            await pool.open(episode, {}, 0)
            await pool.call(episode, [add(2)])
        await pool.call("a", [("where", {})])
        await kill_idle(pool)
        with pytest.raises(
            EnvironmentFailure, match="its state had to be made anew, and where gave another result"
        ):
            await pool.call("a", [add(1)])
        with pytest.raises(EnvironmentFailure, match="where gave another result"):
            await pool.reply("a", "text")
        assert await pool.finish("a") is None
        assert await one(pool, "b", add(1)) == ("3", None)
        assert pool.num_ended == 1

    play(scenario, environment=COUNTER)


def test_what_cannot_be_repeated_fails_with_its_process(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for episode in "abc":
            await pool.open(episode, {}, 0)
        assert await one(pool, "a", add(1)) == ("1", None)
        with pytest.raises(
            EnvironmentFailure, match="its state had to be made anew, and it cannot be replayed"
        ):
            await pool.call("b", [odd("exit 3")])
        with pytest.raises(EnvironmentFailure, match="cannot be replayed"):
            await pool.call("a", [add(1)])
        with pytest.raises(EnvironmentFailure, match="cannot be replayed"):
            await pool.finish("c")
        assert await pool.finish("a") is await pool.finish("b") is None
        assert pool.num_ended == 1
        await pool.open("a", {}, 0)
        assert await one(pool, "a", add(1)) == ("1", None)

    play(scenario, environment=UNREPEATABLE)


def test_a_cancelled_async_call_costs_no_state(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        await pool.call("a", [add(1)])
        assert await one(pool, "a", ("slow", {"what": "wait"})) == (
            "slow took longer than 0.3 s.",
            "timeout",
        )
        assert await one(pool, "a", add(1)) == ("2", None)
        assert pool.num_ended == 0

    play(scenario, environment=UNREPEATABLE, call_timeout_s=0.3)


def test_an_episode_that_its_caller_gives_up_still_has_its_reward(play: Play) -> None:
    """The call that was given up leaves no trace: the process is ended at the call's own limit."""

    async def scenario(pool: EnvironmentThread) -> None:
        for name in "ab":
            await pool.open(name, {}, 0)
            await pool.call(name, [add(2)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pool.call(name, [odd("hang")])
        await pool.finish("b")
        assert await pool.finish("a") == RewardResult(2.0, False)
        assert pool.num_ended == 2

    play(scenario, environment=COUNTER, call_timeout_s=1.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"reset": "raise no"}, "reset raised ValueError: no"),
        (
            {"reset": "object"},
            "reset returned a value of type object, which is neither text nor None",
        ),
        ({"reset": "exit 3"}, r"reset ended its process \(exit code 3\)"),
        pytest.param({"reset": "fill"}, "reset ran out of memory", marks=pytest.mark.slow),
        ({("a", "b"): 1}, "the row cannot be sent to its process"),
    ],
)
def test_a_reset_that_fails_is_a_failure(play: Play, row: Any, says: str) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        with pytest.raises(EnvironmentFailure, match=says):
            await pool.open("a", row, 0)
        with pytest.raises(EnvironmentFailure, match=says):
            await pool.call("a", [add(1)])
        assert await pool.finish("a") is None
        assert await pool.open("a", {}, 0) is None
        assert await one(pool, "a", add(1)) == ("1", None)

    play(scenario, environment=COUNTER, memory_mb=200)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raise no", "raised ValueError: no"),
        ("exit 3", r"ended its process \(exit code 3\)"),
        pytest.param("hang", "took longer than 1 s", marks=pytest.mark.slow),
        ("object", "returned"),
    ],
)
def test_replies_and_rewards_that_fail_are_failures(play: Play, what: str, says: str) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        with pytest.raises(EnvironmentFailure, match=f"reply {says}"):
            await pool.reply("a", what)
        assert await pool.finish("a") is None
        await pool.open("b", {"reward": what}, 0)
        with pytest.raises(EnvironmentFailure, match=f"reward {says}"):
            await pool.finish("b")
        with pytest.raises(KeyError):
            await pool.finish("b")

    play(scenario, environment=COUNTER, call_timeout_s=1.0)


def test_a_close_that_fails_leaves_the_reward_result(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for what in ("raise no", "exit 3"):
            await pool.open(what, {"close": what}, 0)
            await pool.call(what, [add(20)])
            assert await pool.finish(what) == RewardResult(20.0, True)

    play(scenario, environment=COUNTER)


def test_a_plain_call_in_flight_is_sent_again_once(play: Play, tmp_path: Path) -> None:
    """Not the guilty one, which has its result: here an async call ends the process while a plain one is with it."""

    async def scenario(pool: EnvironmentThread) -> None:
        for name in "ab":
            await pool.open(name, {}, 0)
        path = str(tmp_path / "count")
        calls = [
            pool.call("a", [("count_to_file", {"path": path})]),
            pool.call("b", [("process", {"text": "x"})]),
        ]
        (first,), (second,) = await asyncio.gather(*calls)
        assert first.error == "ended" and second.error is None
        assert Path(path).read_text() == "x\n"

    play(scenario, tools=("odd_tools:count_to_file", "odd_tools:process"))
