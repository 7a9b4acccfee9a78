"""A judge or a sandbox over HTTP that is down, asked by worker processes: what it costs, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.worker_faults import ServiceFaults
from tests.http_server import Handler, serving

pytestmark = pytest.mark.slow

JUDGE = "megarl.rollout.rewards.llm_judge:score"
RIGHT = RewardResult(1.0, True)
ROW = {"prompt": "3 * 4?"}
Build = Callable[..., RewardWorkers]


class Judge:
    """Answers as `mode` says: `well`, `down` (status 503), or `hang` until the end of the test."""

    def __init__(self) -> None:
        self.mode = "well"
        self.asked = 0
        self.ended = threading.Event()
        self.url = ""

    def answer(self, handler: Handler, body: dict[str, Any]) -> None:
        self.asked += 1
        if self.mode == "hang":
            self.ended.wait()
        reply = {"choices": [{"message": {"content": "VERDICT: CORRECT"}}]}
        with suppress(ConnectionError):  # the asker's time may be over
            handler.send(503 if self.mode == "down" else 200, json.dumps(reply).encode())


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    with serving(judge.answer) as address:
        judge.url = f"{address}/v1"
        yield judge
        judge.ended.set()


def of_judge(faults: list[ServiceFaults], judge: Judge) -> ServiceFaults:
    """The counts of several times, together."""
    assert {part.service for part in faults} == {judge.url.split("/")[2]}
    return ServiceFaults(
        service=faults[0].service,
        retries=sum(part.retries for part in faults),
        lost=sum(part.lost for part in faults),
        outages=sum(part.outages for part in faults),
        recoveries=sum(part.recoveries for part in faults),
        down_s=sum(part.down_s for part in faults),
        reason=faults[0].reason,
    )


def test_a_judge_that_comes_back_costs_no_reward(
    judges: Build, judge: Judge, capfd: pytest.CaptureFixture[str]
) -> None:
    """All wait until a probe is answered."""
    arguments = {"url": judge.url, "model": "m", "retries": 20}
    workers = judges(JUDGE, workers=1, timeout_s=100.0, arguments=arguments)
    faults: list[ServiceFaults] = []

    async def scenario() -> list[Any]:
        assert await workers.reward_results("12", ROW, ["12"]) == [RIGHT]
        assert not workers.take_faults(), "nothing is counted where all is well"
        judge.mode = "down"
        scoring = asyncio.ensure_future(workers.reward_results("12", ROW, ["12"] * 100))
        while not any(part.outages for part in faults):
            await asyncio.sleep(0.02)
            faults.extend(workers.take_faults().services)
        judge.mode = "well"
        return await scoring

    assert asyncio.run(scenario()) == [RIGHT] * 100
    faults.extend(workers.take_faults().services)
    counted = of_judge(faults, judge)
    assert (counted.lost, counted.outages, counted.recoveries) == (0, 1, 1)
    assert counted.retries >= 2 and counted.down_s > 0
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        f"reward.function: {counted.service} does not answer (status 503); calls wait for it"
    )
    assert lines[1].startswith(f"reward.function: {counted.service} answers again, after ")


def test_a_judge_that_hangs_costs_a_few_timeouts_and_not_one_for_each_sample(
    judges: Build, judge: Judge
) -> None:
    """The first rounds of 64 wait for it; the others fail at once, and say why."""
    judge.mode = "hang"
    arguments = {"url": judge.url, "model": "m", "timeout_s": 1.0}
    workers = judges(JUDGE, workers=1, timeout_s=6.0, arguments=arguments)
    results = workers.wait_for_rewards("12", ROW, ["12"] * 1000)
    words = [result.words for result in results if isinstance(result, Failure)]
    assert len(words) == 1000 and judge.asked < 300
    name = judge.url.split("/")[2]
    late = f"raised JudgeError: no verdict: {name} gave no usable answer within 1 s"
    assert sum(text.startswith(late) for text in words) >= 64
    at_once = [text for text in words if f"{name} has not answered for " in text]
    assert len(at_once) > 600
    counted = of_judge(list(workers.take_faults().services), judge)
    assert (counted.lost, counted.outages, counted.recoveries) == (1000, 1, 0)


def test_a_process_that_is_killed_in_an_outage_costs_no_reward_either(
    judges: Build, judge: Judge
) -> None:
    """The next one asks as if nothing had been, and the outage that was counted is over."""
    judge.mode = "down"
    arguments = {"url": judge.url, "model": "m", "retries": 20}
    workers = judges(JUDGE, workers=1, timeout_s=100.0, arguments=arguments)
    faults: list[ServiceFaults] = []

    async def scenario() -> list[Any]:
        scoring = asyncio.ensure_future(workers.reward_results("12", ROW, ["12"] * 10))
        while not any(part.outages for part in faults):
            await asyncio.sleep(0.02)
            faults.extend(workers.take_faults().services)
        judge.mode = "well"
        (pid,) = workers.pids()
        os.kill(pid, signal.SIGKILL)
        return await scoring

    assert asyncio.run(scenario()) == [RIGHT] * 10
    after = workers.take_faults()
    counted = of_judge([*faults, *after.services], judge)
    assert (after.ended, counted.outages, counted.recoveries, counted.lost) == (1, 1, 1, 0)


def test_a_remote_sandbox_that_hangs_ends_no_process(judges: Build, judge: Judge) -> None:
    """A plain function gives up before its process would be ended, which would forget the outage."""
    judge.mode = "hang"
    arguments = {"url": judge.url, "total_s": 0.1}
    code = "megarl.rollout.rewards.code:score"
    workers = judges(code, workers=1, timeout_s=1.6, arguments=arguments)
    before = workers.pids()
    row = {"tests": {"inputs": [""], "outputs": ["1"]}}
    results = workers.wait_for_rewards("", row, ["```python\nprint(1)\n```"] * 200)
    assert all(isinstance(result, Failure) for result in results)
    assert workers.pids() == before
    assert judge.asked < 20
    counted = of_judge(list(workers.take_faults().services), judge)
    assert (counted.lost, counted.outages, counted.recoveries) == (200, 1, 0)
