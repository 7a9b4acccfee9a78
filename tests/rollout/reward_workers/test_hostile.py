"""The hostile corpus through real workers: a verdict or a failure for each, nobody stalled, nothing judged correct."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import psutil
import pytest

from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.types.reward_result import RewardResult
from tests.rollout.rewards.hostile import CHOICE, FORMAT, JSON, MATH

pytestmark = pytest.mark.slow

OURS = "megarl.rollout.rewards"
BACKTRACKS = r"((\w+\s?)+)+<answer>(?P<answer>\d+)</answer>"
CORPUS = {  # source -> (its answer, a right response, hostile ones)
    "math": ("42", r"so \boxed{\frac{84}{2}}", MATH),
    "format": ("42", "because <answer>42</answer>", FORMAT),
    "json": ("42", '{"value": 42}', JSON),
    "choice": ("B", "The answer is (B).", CHOICE),
}


@pytest.mark.usefixtures("odd_rewards")
def test_nothing_hostile_is_correct_and_nobody_stalls(judges: Callable[..., RewardWorkers]) -> None:
    assert sum(len(hostile) for _, _, hostile in CORPUS.values()) >= 100
    inner = {"pattern": BACKTRACKS, "function": f"{OURS}.exact:score", "reward": 0.0}
    court = judges(
        None,
        by_source={
            "math": {"function": f"{OURS}.math:score"},
            "format": {"function": f"{OURS}.format:score", "arguments": inner},
            "json": {"function": "odd_rewards:of_json"},
            "choice": {"function": f"{OURS}.multiple_choice:score"},
        },
        timeout_s=1.5,
        memory_mb=512,
    )
    first = court.pids()
    assert len(first) == 8

    async def judge_all(pick: Callable[[str], list[str]]) -> Mapping[str, Sequence[object]]:
        async with asyncio.timeout(120):
            rows = [(source, answer) for source, (answer, _, _) in CORPUS.items()]
            calls = [
                court.reward_results(answer, {"data_source": source}, pick(source))
                for source, answer in rows
            ]
            return dict(zip(CORPUS, await asyncio.gather(*calls), strict=True))

    right = {source: [response] * 4 for source, (_, response, _) in CORPUS.items()}
    found = asyncio.run(judge_all(right.__getitem__))
    assert all(
        isinstance(one, RewardResult) and one.correct
        for reward_results in found.values()
        for one in reward_results
    )
    found = asyncio.run(judge_all(lambda source: CORPUS[source][2]))
    for source, reward_results in found.items():
        for response, one in zip(CORPUS[source][2], reward_results, strict=True):
            assert not (isinstance(one, RewardResult) and (one.correct or one.reward > 0)), (
                source,
                response[:80],
                one,
            )
    judged = [one for one in found["math"] if isinstance(one, RewardResult)]
    assert len(judged) >= 0.85 * len(MATH), (
        "the usual hostile answer is wrong, and no worker is killed for it"
    )
    assert any(not isinstance(one, RewardResult) for one in found["format"]), (
        "the pattern does backtrack without end"
    )
    found = asyncio.run(judge_all(right.__getitem__))
    assert all(
        isinstance(one, RewardResult) and one.correct
        for reward_results in found.values()
        for one in reward_results
    )
    last = court.pids()
    assert len(last) == 8 and set(last) != set(first)
    court.shutdown()
    assert not any(map(psutil.pid_exists, last))
