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


def is_correct(result: object) -> bool:
    return isinstance(result, RewardResult) and result.correct


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
        timeout_s=5,  # a right answer takes 0.1 s, and has to be in time on a busy machine too
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

    def judge_right_ones() -> None:
        results_by_source = asyncio.run(judge_all(lambda source: [CORPUS[source][1]] * 4))
        for source, results in results_by_source.items():
            assert all(map(is_correct, results)), (source, results)

    judge_right_ones()
    results_by_source = asyncio.run(judge_all(lambda source: CORPUS[source][2]))
    for source, results in results_by_source.items():
        for response, result in zip(CORPUS[source][2], results, strict=True):
            assert not is_correct(result), (source, response[:80], result)
            assert not (isinstance(result, RewardResult) and result.reward > 0), response[:80]
    judged = [outcome for outcome in results_by_source["math"] if isinstance(outcome, RewardResult)]
    assert len(judged) >= 0.85 * len(MATH), (
        "the usual hostile answer is wrong, and no worker is killed for it"
    )
    assert any(not isinstance(outcome, RewardResult) for outcome in results_by_source["format"]), (
        "the pattern does backtrack without end"
    )
    judge_right_ones()
    last = court.pids()
    assert len(last) == 8 and set(last) != set(first)
    court.shutdown()
    assert not any(map(psutil.pid_exists, last))
