"""Whatever a reward does in its process, there is a verdict or a failure, and workers are there for the next."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.config import RewardConfig
from megarl.isolation import pool
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.types import UserError
from megarl.types.reward_result import Failure, RewardResult
from tests.leftovers import gone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("odd_rewards")]

ODD = "odd_rewards:score"
PATIENT = "odd_rewards:patient"
Build = Callable[..., RewardWorkers]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a user's module; returns the name of its function."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / f"{tmp_path.name}.py").write_text(f"{text}\n")
        return f"{tmp_path.name}:score"

    return write


def words(found: list[RewardResult | Failure]) -> list[str]:
    return [result.words if isinstance(result, Failure) else "reward_result" for result in found]


@pytest.mark.parametrize("definition", ["def", "async def"])
def test_the_time_in_which_workers_work_is_counted_once(
    module: Callable[[str], str], definition: str
) -> None:
    """The mean of two workers; four calls that one of them has in flight together take the time of one call."""
    sleep = "await asyncio.sleep(0.3)" if "async" in definition else "time.sleep(0.3)"
    name = module(
        f"import asyncio, time\n{definition} score(response, answer, row):\n    {sleep}\n    return 1.0"
    )
    workers = RewardWorkers(RewardConfig(function=name, workers=2), 60.0)
    try:
        began = time.monotonic()
        workers.wait_for_rewards("", {}, ["a", "b", "c", "d"])
        took_s = time.monotonic() - began
        worked_s = workers.take_worked_s()
        assert worked_s is not None
        least_s = 0.15 if "async" in definition else 0.6
        most_s = took_s / 2 if "async" in definition else took_s
        assert 0.95 * least_s <= worked_s <= most_s
        assert workers.take_worked_s() == 0.0
    finally:
        workers.shutdown()


@pytest.mark.parametrize("response", ["hang", "pour late", "exit late"])
def test_the_time_of_a_reward_that_has_no_result_is_counted_too(
    module: Callable[[str], str], response: str
) -> None:
    name = module(
        "import os, time\n"
        "def score(response, answer, row):\n"
        "    time.sleep(1.0 if 'late' in response else 1000)\n"
        "    if 'exit' in response:\n"
        "        os._exit(3)\n"
        "    for descriptor in range(3, 20):\n"
        "        try:\n"
        "            os.write(descriptor, b'no message\\n')\n"
        "        except OSError:\n"
        "            pass\n"
        "    return 1.0\n"
    )
    timeout_s = 60.0 if "late" in response else 1.0
    workers = RewardWorkers(RewardConfig(function=name, workers=1, timeout_s=timeout_s), 60.0)
    try:
        (result,) = workers.wait_for_rewards("", {}, [response])
        assert isinstance(result, Failure)
        assert (workers.take_worked_s() or 0.0) >= 0.95
        assert workers.take_worked_s() == 0.0
    finally:
        workers.shutdown()


def test_the_time_of_a_worker_is_counted_while_it_works(module: Callable[[str], str]) -> None:
    """As of an asynchronous function, whose worker may have something in flight for the whole run."""
    name = module(
        "import time\ndef score(response, answer, row):\n    time.sleep(1.0)\n    return 1.0"
    )
    workers = RewardWorkers(RewardConfig(function=name, workers=1), 60.0)
    thread = threading.Thread(target=workers.wait_for_rewards, args=("", {}, ["a"]))
    try:
        thread.start()
        taken = []
        while thread.is_alive():
            taken.append(workers.take_worked_s() or 0.0)
            time.sleep(0.05)
        taken.append(workers.take_worked_s() or 0.0)
        assert len([seconds for seconds in taken if seconds > 0.0]) >= 2
        assert max(taken) < sum(taken) and sum(taken) >= 0.95
    finally:
        workers.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        ("deaf", "took longer than 5 s"),
        ("stop", "took longer than 5 s"),
        ("fill", "ran out of memory"),
        ("exit 3", "ended its process (exit code 3)"),
        ("exit 0", "ended its process (exit code 0)"),
        ("segfault", "ended its process (killed by SIGSEGV)"),
        ("signal 40", "ended its process (killed by signal 40)"),
        ("signal 9", "ended its process (killed by SIGKILL)"),
        ("close", "closed the socket of its worker process"),
        ("close deaf", "closed the socket of its worker process"),
        ("shut", "closed the socket of its worker process"),
        ("exec", "closed the socket of its worker process"),
        ("pour", "wrote to the socket of its worker process"),
        ("reply garbage", "wrote to the socket of its worker process"),
        ("reply []", "wrote to the socket of its worker process"),
        ('reply [1, "a", "b", "c", "d"]', "wrote to the socket of its worker process"),
        ("reply [1, 1.0, true, null, 7]", "wrote to the socket of its worker process"),
        ("reply [1, {}, true, null]", "wrote to the socket of its worker process"),
        ("reply [1, NaN, true, null]", "wrote to the socket of its worker process"),
        ("reply [1e9, 1.0, true, null]", "wrote to the socket of its worker process"),
        (f"reply [1, 1{'0' * 400}, true, null]", "wrote to the socket of its worker process"),
        (f"reply {'[' * 100_000}", "wrote to the socket of its worker process"),
        ("raise ValueError", "raised ValueError: no unit"),
        ("raise SystemExit", "raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt:"),
        ("raise Unprintable", "raised _Unprintable"),
        ("recurse", "raised RecursionError: maximum recursion depth exceeded"),
        ("nan", "returned nan"),
        ("words", "returned 'good'"),
    ],
)
def test_a_failure_is_said_in_words_and_costs_nobody_else_a_reward_result(
    judges: Build, response: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOOK_S", 600.0)  # by which a process that stops is not over time
    odd = judges(ODD, workers=1, timeout_s=5.0 if "longer" in failure else 60.0, memory_mb=200)
    results = odd.wait_for_rewards("7", {}, ["7", response, "8", "7"])
    assert results[0] == results[3] == RewardResult(1.0, True)
    assert results[2] == RewardResult(0.0, False)
    assert isinstance(results[1], Failure) and results[1].words == failure
    assert len(odd.pids()) == 1
    before = odd.pids()
    odd.shutdown()
    assert gone(before)


def test_what_it_prints_and_reads_is_not_the_protocol(
    judges: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = judges(ODD, workers=1)
    assert odd.wait_for_rewards("7", {}, ["flood", "read", "nest 3", "7"]) == [
        RewardResult(0.25, False), RewardResult(0.0, False), RewardResult(1.0, True), RewardResult(1.0, True)
    ]  # fmt: skip
    odd.shutdown()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Exception ignored" not in printed.err


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("daemon", "took longer than 5 s"),
        # the child does not keep the news from coming
        ("fork_and_leave", "ended its process (exit code 3)"),
    ],
)
def test_what_it_started_ends_with_it(
    judges: Build, tmp_path: Path, word: str, failure: str
) -> None:
    odd = judges(ODD, workers=1, timeout_s=5.0)
    (result,) = odd.wait_for_rewards("7", {}, [f"{word} {tmp_path / 'pid'}"])
    assert result == Failure(failure)
    assert gone([int((tmp_path / "pid").read_text())])


def test_a_slow_reward_result_holds_up_no_other_prompt(judges: Build) -> None:
    odd = judges(ODD, workers=2, timeout_s=300.0)

    async def together() -> None:
        slow = asyncio.create_task(odd.reward_results("7", {}, ["sleep 200"]))
        for _ in range(20):
            assert await odd.reward_results("7", {}, ["7"] * 8) == [RewardResult(1.0, True)] * 8
        assert not slow.done()
        slow.cancel()

    asyncio.run(together())


def test_groups_are_judged_in_any_loop_and_in_order(judges: Build) -> None:
    odd = judges(ODD, workers=3)

    async def many() -> list[Any]:
        return await asyncio.gather(
            *(odd.reward_results(str(n), {}, [str(m) for m in range(9)]) for n in range(9))
        )

    for _ in range(2):  # a loop each
        for n, results in enumerate(asyncio.run(many())):
            assert [result.correct for result in results] == [m == n for m in range(9)]


def test_import_time_is_not_reward_result_time(judges: Build, module: Callable[[str], str]) -> None:
    path = module(
        "import time\ntime.sleep(5.2)\nkept = bytearray(300 * 2**20)\ndef score(response, answer, row): return 1.0"
    )
    slow = judges(path, workers=1, timeout_s=5.0, memory_mb=50)
    assert slow.wait_for_rewards("7", {}, ["7"]) == [RewardResult(1.0, True)], (
        "nor is what it holds its verdict's memory"
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise OSError('no disk')", "OSError: no disk"),
        (
            "import os; os._exit(5)",
            r":score ended its process \(exit code 5\) while it was imported",
        ),
        (
            "import os, time; os.closerange(3, 99); time.sleep(99)",
            ":score closed the socket of its worker process",
        ),
        (
            "from odd_rewards import _reply; _reply('[1, 2]')",
            ":score wrote to the socket of its worker process while",
        ),
        ("import time; time.sleep(1000)", "was not imported within 1 s"),
    ],
)
def test_an_import_that_fails_is_an_error(
    module: Callable[[str], str], body: str, problem: str
) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(UserError, match=problem) as caught:
        RewardWorkers(RewardConfig(function=module(body)), 1.0 if "within" in problem else 120.0)
    assert caught.value.where == "reward.function"
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("kills", "says"), [(2, None), (100, r"score ended its process \(killed by SIGKILL\) while")]
)
def test_a_worker_that_is_killed_while_it_imports_is_replaced(
    judges: Build, tmp_path: Path, module: Callable[[str], str], kills: int, says: str | None
) -> None:
    """As by a machine that is short of memory for a moment, or for good."""
    left = tmp_path / "left"
    path = module(
        "import os, pathlib, signal\n"
        f"left = pathlib.Path({str(left)!r})\n"
        "count = int(left.read_text()) if left.exists() else 0\n"
        "if count:\n"
        "    left.write_text(str(count - 1))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(response, answer, row): return os._exit(0) if response == 'exit' else 1.0"
    )
    killed = judges(path, workers=1)
    left.write_text(str(kills))
    if says:
        with pytest.raises(UserError, match=says):
            killed.wait_for_rewards("7", {}, ["exit", "7"])
    else:
        assert killed.wait_for_rewards("7", {}, ["exit", "7"])[1] == RewardResult(1.0, True)


def test_rows_come_as_json_can_say_them(judges: Build) -> None:
    row = {
        "day": datetime.date(2026, 1, 2),
        "raw": b"a\xff",
        "array": np.arange(3),
        "number": np.float32(0.5),
        "nested": [{"text": "\ud800\x00\u2028\n"}],
        "nothing": None,
        1: 2,
    }
    same = '{"day": "2026-01-02", "raw": "a\\\\xff", "array": [0, 1, 2], "number": 0.5,'
    same += ' "nested": [{"text": "\\ud800\\u0000\\u2028\\n"}], "nothing": null, "1": 2}'
    (result,) = judges("odd_rewards:of_row", workers=1).wait_for_rewards("7", row, [same])
    assert result == RewardResult(1.0, True)


def test_a_row_that_cannot_be_said_is_a_failure(judges: Build) -> None:
    odd = judges(ODD, workers=1)
    looped: dict[str, Any] = {}
    looped["self"] = looped
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    rows: list[Any] = [{("a", "b"): 1}, looped, {"deep": deep}]
    for row in rows:
        assert all(
            "the row cannot be sent" in text
            for text in words(odd.wait_for_rewards("7", row, ["7", "8"]))
        )
    assert odd.wait_for_rewards("7", {"object": object()}, ["7"]) == [RewardResult(1.0, True)]


def test_an_episode_is_given_to_functions_that_take_it(judges: Build) -> None:
    """Whole, in its process; None where the response is none."""
    call = {"name": "say", "arguments": {"words": "\ud800\u2028"}, "result": "x\n", "error": None}
    turn = {"role": "assistant", "text": "so", "calls": [call, call], "reward": 0.0}
    episode = {
        "turns": [turn, turn],
        "calls": 4,
        "call_errors": 0,
        "end": "answered",
        "tool_s": 0.1,
    }
    by_source = {"later": {"function": "odd_rewards:of_episode_later", "arguments": {"share": 0.5}}}
    by_source["plain"] = {"function": ODD, "arguments": {}}
    three = judges("odd_rewards:of_episode", workers=1, by_source=by_source)
    for source, rewards in (("", [4.0, -1.0]), ("later", [2.0, -0.5]), ("plain", [1.0, 1.0])):
        results = three.wait_for_rewards("7", {"data_source": source}, ["7", "7"], [episode, None])
        assert [result.reward for result in results] == rewards  # type: ignore[union-attr]
        alone = three.wait_for_rewards("7", {"data_source": source}, ["7"])
        assert [result.reward for result in alone] == rewards[1:]  # type: ignore[union-attr]


def test_each_source_has_its_judge(judges: Build) -> None:
    worth = "odd_rewards:worth"
    pool = judges(
        ODD,
        source="kind",
        workers=1,
        by_source={
            "a": {"function": worth, "arguments": {"right": 2.0}},
            "b": {"function": worth, "arguments": {"right": 3.0, "wrong": -1.0}},
        },
    )
    rows = [{"kind": "a"}, {"kind": "b"}, {"kind": "c"}, {}, {"kind": ["a"]}]
    rewards = [
        [result.reward for result in pool.wait_for_rewards("7", row, ["7", "8"])]  # type: ignore[union-attr]
        for row in rows
    ]
    assert rewards == [[2.0, 0.0], [3.0, -1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    assert len(pool.pids()) == 3


def test_an_async_function_judges_many_at_once(judges: Build) -> None:
    patient = judges(PATIENT, workers=1, timeout_s=60.0)
    began = time.monotonic()
    results = patient.wait_for_rewards("7", {}, ["7"] * 256)
    assert results == [RewardResult(1.0, True)] * 256
    assert time.monotonic() - began < 256 * 0.05, "one after the other they would take longer"
    assert judges("odd_rewards:judge", workers=1).wait_for_rewards("7", {}, ["7"]) == [
        RewardResult(1.0, True)
    ]


def test_an_async_function_that_hangs_is_cancelled_in_its_worker(judges: Build) -> None:
    patient = judges(PATIENT, workers=1, timeout_s=5.0)
    before = patient.pids()
    results = patient.wait_for_rewards("7", {}, ["7", "hang", "7", "raise x", "hang"])
    late = "took longer than 5 s"
    assert words(results) == ["reward_result", late, "reward_result", "raised KeyError: 'x'", late]
    assert patient.pids() == before


def test_many_that_hang_and_begin_late_cost_no_worker(judges: Build) -> None:
    """The last begins two seconds after it was asked: it is given up in time, not asked for again by itself."""
    patient = judges(PATIENT, workers=1, timeout_s=2.0)
    before = patient.pids()
    assert set(words(patient.wait_for_rewards("7", {}, ["work"] * 64))) == {"took longer than 2 s"}
    assert patient.pids() == before


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("cling", "took longer than 5 s"),
        ("block", "took longer than 5 s"),
        ("exit", "ended its process (exit code 4)"),
    ],
)
def test_others_in_flight_at_a_workers_end_are_asked_for_again(
    judges: Build, word: str, failure: str
) -> None:
    patient = judges(PATIENT, workers=2, timeout_s=5.0)
    before = patient.pids()
    results = patient.wait_for_rewards("7", {}, [word, "7", "7", "7"])
    assert words(results) == [failure, "reward_result", "reward_result", "reward_result"]
    assert len(patient.pids()) == 2 and patient.pids() != before


def test_a_worker_that_others_kill_is_replaced(judges: Build) -> None:
    odd = judges(ODD, workers=1)
    (first,) = odd.pids()
    os.kill(first, signal.SIGKILL)
    assert gone([first])
    results = odd.wait_for_rewards("7", {}, ["7"] * 3)
    assert results[1:] == [RewardResult(1.0, True)] * 2, "one at most was with it"
    assert odd.pids() != [first]


def test_who_waits_at_the_end_is_not_left_waiting(judges: Build) -> None:
    odd = judges(ODD, workers=1, timeout_s=100.0)

    async def wait() -> None:
        tasks = [asyncio.create_task(odd.reward_results("7", {}, ["deaf"])) for _ in range(3)]
        assert await odd.reward_results("7", {}, []) == []
        await asyncio.to_thread(odd.shutdown)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in errors)

    pids = odd.pids()
    asyncio.run(wait())
    assert gone(pids)
    odd.shutdown()


def test_a_worker_imports_nothing_heavy() -> None:
    heavy = ["torch", "sglang", "ray", "pyarrow", "transformers", "sympy", "pydantic"]
    script = f"import sys, megarl.rollout.reward_workers.reward_host; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"
