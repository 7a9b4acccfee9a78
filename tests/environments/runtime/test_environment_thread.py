"""Calls through real worker processes: whatever a tool does, there is a result for the model, and for all others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.environments.runtime.results import CallResult
from megarl.types import UserError
from tests.environments.runtime.conftest import told

Play = Callable[..., Any]
WORK, PATIENT = "odd_tools:work", "odd_tools:patient"
CALCULATE = "megarl.environments.calculator:calculate"


def called(
    play: Play, calls: list[tuple[str, Any]], **settings: Any
) -> list[tuple[str, str | None]]:
    """What comes of calls that are made together."""

    async def scenario(pool: EnvironmentThread) -> list[CallResult]:
        assert await pool.open("a", {}, 0) is None
        results = await pool.call("a", calls)
        assert await pool.finish("a") is None
        return results

    return told(play(scenario, **settings))


def test_calls_are_answered_in_their_order_and_refused_in_a_sentence(play: Play) -> None:
    calls = [
        ("calculate", {"expression": "6 * 7"}), ("add", {}), ("work", {"text": "x"}), ("work", "{}"),
        ("work", {"what": "raise no\n\nunit"}), ("work", {"what": "nothing"}), ("work", {"what": "number"}),
        ("work", {"what": "object"}), ("work", {"what": "surrogate \u2028"}), ("calculate", {"expression": "1 / 0"}),
        ("work", {"what": "exit_politely"}), ("work", {"what": "recurse"}), ("work", {"what": "last"}),
    ]  # fmt: skip
    results = called(play, calls, tools=(WORK, CALCULATE))
    text, error = results.pop(11)
    assert text.startswith("RecursionError: maximum recursion depth exceeded") and error == "raised"
    assert results == [
        ("42", None),
        ("There is no tool 'add'. The tools are: calculate, work.", "unknown"),
        (
            "work was not called: the argument 'what' is missing; there is no argument 'text'.",
            "arguments",
        ),
        ("work was not called: its arguments are not a JSON object.", "arguments"),
        ("ValueError: no unit", "raised"),
        ("", None),
        ("7", None),
        ("work returned a value of type object, which is neither text nor JSON.", "result"),
        ("?\u2028", None),
        ("ZeroDivisionError: division by zero", "raised"),
        ("SystemExit: 3", "raised"),
        ("last", None),
    ]


def test_observations_have_rewards_and_ends(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        good, bad = await pool.call(
            "a", [("worth", {"text": "t", "reward": reward}) for reward in (0.5, "1")]
        )
        assert replace(good, seconds=0.0) == CallResult("t!", 0.5, True)
        assert (bad.error, bad.done) == ("result", False)

    play(scenario, tools=("odd_tools:worth",), arguments={"done": True, "extra": "!"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "text", "error"),
    [
        ("hang", "work took longer than 1 s.", "timeout"),
        ("loop", "work took longer than 1 s.", "timeout"),
        ("deaf", "work took longer than 1 s.", "timeout"),
        ("stop", "work took longer than 1 s.", "timeout"),
        ("fill", "work ran out of memory.", "memory"),
        ("exit 3", "work ended its process (exit code 3).", "ended"),
        ("segfault", "work ended its process (killed by SIGSEGV).", "ended"),
        ("signal 9", "work ended its process (killed by SIGKILL).", "ended"),
        ("close", "work closed the socket of its worker process.", "ended"),
        ("shut", "work closed the socket of its worker process.", "ended"),
        ("garbage []", "work wrote to the socket of its worker process.", "ended"),
        ('garbage [99, "none"]', "work wrote to the socket of its worker process.", "ended"),
        (
            'garbage [1, "text", "t", NaN, false]',
            "work wrote to the socket of its worker process.",
            "ended",
        ),
        (
            'garbage [1, "error", "mine", "words", false]',
            "work wrote to the socket of its worker process.",
            "ended",
        ),
        (f"garbage {'[' * 100_000}", "work wrote to the socket of its worker process.", "ended"),
    ],
)
def test_a_call_that_ends_its_process_costs_no_other(
    play: Play, what: str, text: str, error: str
) -> None:
    calls = [("work", {"what": word}) for word in ("before", what, "after", "last")]
    limit_s = 1.0 if error == "timeout" else 60.0
    results = called(play, calls, tools=(WORK,), call_timeout_s=limit_s, memory_mb=200)
    assert results == [("before", None), (text, error), ("after", None), ("last", None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "text", "error"),
    [
        ("wait", "patient took longer than 1 s.", "timeout"),
        ("block", "patient took longer than 1 s.", "timeout"),
        ("cling", "patient took longer than 1 s.", "timeout"),
        ("exit 3", "patient ended its process (exit code 3).", "ended"),
        ("subtask", "patient ended its process (exit code 1).", "ended"),
        ("fill", "patient ran out of memory.", "memory"),
        ("raise no", "ValueError: no", "raised"),
    ],
)
def test_an_async_call_that_ends_its_process_costs_no_other(
    play: Play, what: str, text: str, error: str
) -> None:
    calls = [("patient", {"what": word}) for word in ("sleep 0.01", what, "after", "sleep 0.02")]
    results = called(
        play,
        [*calls, ("work", {"what": "w"})],
        tools=(PATIENT, WORK),
        call_timeout_s=1.0,
        memory_mb=200,
    )
    assert results == [
        ("sleep 0.01", None),
        (text, error),
        ("after", None),
        ("sleep 0.02", None),
        ("w", None),
    ]


def test_async_calls_run_together(play: Play) -> None:
    names = [str(number) for number in range(100)]
    calls = [("meet", {"name": name, "num": len(names)}) for name in names]
    assert called(play, calls, tools=("odd_tools:meet",)) == [(name, None) for name in names]


def test_async_calls_are_spread_over_the_processes(play: Play) -> None:
    """All are in flight before the first has an answer."""
    places = called(play, [("place", {})] * 15, tools=("odd_tools:place",), workers=3)
    assert sorted(Counter(places).values()) == [5, 5, 5]


def test_a_plain_call_that_hangs_holds_up_no_async_call(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for name in "ab":
            await pool.open(name, {}, 0)
        hanging = asyncio.create_task(pool.call("a", [("work", {"what": "hang"})]))
        for _ in range(20):
            assert told(await pool.call("b", [("patient", {"what": "x"})])) == [("x", None)]
        assert not hanging.done()
        hanging.cancel()

    play(scenario, tools=(WORK, PATIENT), call_timeout_s=300.0)


@pytest.mark.slow
def test_a_plain_call_is_not_blamed_for_an_async_one_that_blocks(
    play: Play, tmp_path: Path
) -> None:
    """It would be overdue first: the process has a second more for calls that it can cancel."""

    async def scenario(pool: EnvironmentThread) -> None:
        for name in "ab":
            await pool.open(name, {}, 0)
        path = tmp_path / "blocks"
        blocking = asyncio.create_task(pool.call("a", [("patient", {"what": f"block {path}"})]))
        while not path.exists():
            await asyncio.sleep(0.01)
        assert told(await pool.call("b", [("work", {"what": "x"})])) == [("x", None)]
        assert told(await blocking) == [("patient took longer than 1.5 s.", "timeout")]

    play(scenario, tools=(WORK, PATIENT), call_timeout_s=1.5)


def test_a_plain_call_that_hangs_holds_up_no_other_process(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        hanging = asyncio.create_task(pool.call("a", [("work", {"what": "hang"})]))
        await pool.open("b", {}, 0)
        results = await pool.call("b", [("work", {"what": str(number)}) for number in range(20)])
        assert told(results) == [(str(number), None) for number in range(20)]
        assert not hanging.done()
        hanging.cancel()

    play(scenario, tools=(WORK,), workers=2, call_timeout_s=300.0)


def test_a_flood_is_cut_in_its_process(play: Play) -> None:
    calls = [
        ("work", {"what": f"flood {50 * 2**20}"}),
        ("work", {"what": "flood 1000"}),
        ("work", {"what": "print"}),
    ]
    (flood, bounded, printed) = called(play, calls, tools=(WORK,), result_bytes=1000)
    assert flood[1] is None and len(flood[0]) < 1100 and "52427800 characters left out" in flood[0]
    assert bounded == ("x" * 1000, None)
    assert printed == ("printed", None), (
        "what it prints is not the protocol, and its input is empty"
    )


def test_the_largest_result_of_escaped_letters_arrives(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> str:
        await pool.open("a", {}, 0)
        (result,) = await pool.call("a", [("worth", {"text": "\x00" * 2**20, "reward": 0})])
        return result.text

    assert play(scenario, tools=("odd_tools:worth",), result_bytes=2**20) == "\x00" * 2**20


@pytest.mark.parametrize("named", [None, "WANDB_API_KEY"])
def test_secrets_of_the_run_are_not_passed_on(
    play: Play, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Unless an argument names one: a judge may ask with the same key."""
    secrets = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"}
    secrets |= {"MLFLOW_TRACKING_TOKEN"}
    passed_on = {"MEGARL_JUDGE_KEY", "MLFLOW_TRACKING_URI"}
    for name in secrets | passed_on:
        monkeypatch.setenv(name, "set")
    arguments = {"key_env": named} if named else {}
    ((text, error),) = called(
        play, [("variables", {})], tools=("odd_tools:variables",), arguments=arguments
    )
    assert error is None and passed_on <= {*json.loads(text)}
    assert secrets & {*json.loads(text)} == {named} - {None}


def test_an_episode_is_named_once(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        with pytest.raises(ValueError, match="'a' is open"):
            await pool.open("a", {}, 0)
        assert await pool.reply("a", "text") is None
        await pool.finish("a")
        with pytest.raises(KeyError):
            await pool.call("a", [])
        assert await pool.open("a", {}, 0) is None

    play(scenario, tools=(WORK,))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"tools": ("odd_tools:nothing_there",)},
            "episode.tools: odd_tools has no 'nothing_there'",
        ),
        (
            {"tools": ("odd_tools:misbehave",), "arguments": {"x": 1}},
            "episode.arguments: no tool takes 'x'",
        ),
        ({"environment": "odd_tools:work"}, "episode.environment: odd_tools:work is a function"),
        (
            {"tools": ("dying:tool",)},
            "episode.tools: dying:tool ended its process (exit code 5) while it was imported",
        ),
        (
            {"tools": ("late:tool",), "start_s": 1.0},
            "episode.tools: late:tool was not imported within 1 s",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error(
    play: Play,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    error: str,
) -> None:
    (tmp_path / "dying.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "late.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def never(pool: EnvironmentThread) -> None:
        raise AssertionError

    with pytest.raises(UserError) as caught:
        play(never, **settings)
    assert str(caught.value).startswith(error)


@pytest.mark.slow
def test_tools_that_can_no_longer_be_imported_are_an_error(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once.py").write_text(
        'import os\ndef tool() -> str:\n    """End."""\n    os._exit(1)\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario(pool: EnvironmentThread) -> None:
        await pool.open("a", {}, 0)
        (tmp_path / "once.py").write_text("raise OSError('no disk')\n")
        with pytest.raises(UserError, match="OSError: no disk"):
            await pool.call("a", [("tool", {})] * 3)
        with pytest.raises(UserError, match="OSError: no disk"):
            await pool.call("a", [("tool", {})])

    play(scenario, tools=("once:tool",))


def test_who_waits_at_the_end_is_cancelled(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        for name in "abcd":
            await pool.open(name, {}, 0)
        tasks = [
            asyncio.create_task(pool.call(name, [("work", {"what": "deaf"})])) for name in "abc"
        ]
        await pool.call("d", [("patient", {"what": "x"})])
        await asyncio.to_thread(pool.shutdown)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in errors)

    play(scenario, tools=(WORK, PATIENT), call_timeout_s=300.0)
