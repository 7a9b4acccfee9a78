"""When metrics say that a run is sick, and with which words: of sick series, healthy ones, and random ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.tracking.health import Health
from megarl.types import Metrics

# the metrics that conditions read, of runs of the quickstart
RECORDED = Path(__file__).parent / "recorded"


def reported(history: list[Metrics], *, learns_from_rewards: bool = True) -> list[str]:
    """All lines of a run with these records."""
    health, lines = Health(learns_from_rewards), []
    for record in history:
        health, of_step = health.after(record)
        lines += of_step
    return lines


def step(number: int, **changed: float) -> Metrics:
    """A healthy step, with changes by the last part of a metric's name."""
    healthy = {
        "step": number,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/accuracy": 0.5,
        "reward/groups_without_variance": 0.25,
        "train/grad_norm": 1.0,
        "train/entropy": 0.4,
        "train/lr": 0.01,
        "rollout/logprob_diff_mean": 0.005,
        "rollout/truncated": 0.1,
        "rollout/response_length_mean": 100.0,
        "experts/unused": 0.03,
        "time/step_s": 10.0,
        "idle/ranks_s": 2.0,
        "idle/engines_s": 2.0,
    }
    named = {name.split("/")[-1]: name for name in healthy}
    named["logprob_diff"] = "rollout/logprob_diff_mean"
    named["length"] = "rollout/response_length_mean"
    return healthy | {named[name]: value for name, value in changed.items()}


def equal(number: int, reward: float, **changed: float) -> Metrics:
    """A step whose samples all have this reward."""
    of_rewards = {
        "mean": reward,
        "std": 0.0,
        "accuracy": float(reward >= 1),
        "groups_without_variance": 1.0,
    }
    return step(number, **{**of_rewards, "grad_norm": 0.0, **changed})


def history(*stretches: tuple[int, dict[str, float]]) -> list[Metrics]:
    """Steps from 1: so many with these changes, then so many with those."""
    changes = [changed for count, changed in stretches for _ in range(count)]
    return [step(number, **changed) for number, changed in enumerate(changes, start=1)]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (
            equal(3, 0.0),
            "the reward 0, so that rewards teach nothing, and train/grad_norm is 0; the mean reward was 0.5 in",
        ),
        (equal(3, 0.0), "in step 1: train.lr (0.01) is probably too high, try a tenth of it"),
        (equal(3, 1.0), "all answers are right: data.train is too easy"),
        (
            step(3, groups_without_variance=1.0),
            "no group has two different rewards, so that rewards teach nothing; raise",
        ),
        (step(3, groups_without_variance=1.0), "rollout.samples_per_prompt or rollout.temperature"),
        (step(3, groups_without_variance=1.0, entropy=0.0), "train/entropy is 0: lower train.lr"),
        (
            step(3, grad_norm=0.0),
            "train/grad_norm is 0, so that the policy does not change; train.lr",
        ),
        (step(3, grad_norm=0.0) | {"train/clipped": 1.0}, "every token is clipped: lower train.lr"),
        (
            step(3, grad_norm=0.0) | {"train/rollout_correction_masked": 1.0},
            "algorithm.rollout_correction drops every token",
        ),
        (step(3, entropy=0.0), "train/entropy is 0, so that the policy gives one answer"),
        (
            step(3, logprob_diff=0.12),
            "rollout/logprob_diff_mean is 0.12: the engine",
        ),
    ],
)
def test_a_step_that_is_sick_is_reported_at_once_with_the_likely_key(
    now: Metrics, says: str
) -> None:
    lines = reported([*history((2, {})), now])
    assert says in lines[0] and lines[0].startswith("step 3: ")


def test_a_reward_that_never_differs_is_the_functions_fault() -> None:
    (line,) = reported([equal(number, 0.5) for number in range(1, 9)])
    assert (
        line.startswith("step 1: every sample has the reward 0.5, ")
        and "reward.function may not tell" in line
    )
    for reward in (0.0, 1.0):
        (line,) = reported([equal(number, reward) for number in range(1, 9)])
        assert (
            "(try it with megarl reward-check), or data.train may be too hard or too easy" in line
        )
    rounded = {"mean": 0.7, "std": 3e-8, "accuracy": 0.0, "groups_without_variance": 1.0}
    (line,) = reported([step(1, **rounded)])
    assert "every sample has the reward 0.7" in line, "a float32 mean of equal rewards has a spread"


@pytest.mark.parametrize(
    ("sick", "says"),
    [
        (
            {"groups_without_variance": 0.97, "accuracy": 0.01, "mean": 0.01, "std": 0.1},
            "97% of the groups have equal rewards",
        ),
        ({"grad_norm": 1e-4}, "train/grad_norm has fallen from 1 to 0.0001"),
        (
            {"entropy": 0.03},
            "train/entropy has fallen from 0.4 to 0.03, with reward/accuracy from 50% to 50% alone",
        ),
        (
            {"logprob_diff": 0.03},
            "rollout/logprob_diff_mean has grown from 0.005 to 0.03: the ratio measures the engine's",
        ),
        (
            {"mean": -0.1, "accuracy": 0.2},
            "reward/mean has fallen from 0.5 in step 1 to -0.1: train.lr (0.01) is probably too high",
        ),
        (
            {"truncated": 0.75},
            "75% of the responses are cut off, and have no answer to reward; raise rollout.max_response_tokens",
        ),
        (
            {"length": 250.0, "accuracy": 0.5},
            "rollout/response_length_mean has grown from 100 to 250 tokens, and reward/accuracy is 50%",
        ),
        (
            {"unused": 0.1},
            "10% of the experts get no token in an update, at the start it was 3%: the router collapses",
        ),
        (
            {"ranks_s": 6.0},
            "GPUs that only train wait for 60% of a step (idle/ranks_s); set rollout.ahead",
        ),
        (
            {"engines_s": 7.0},
            "GPUs that only sample wait for 70% of a step (idle/engines_s); set rollout.ahead",
        ),
    ],
)
def test_a_collapse_is_reported_when_it_lasts(sick: dict[str, float], says: str) -> None:
    assert reported(history((6, {}), (2, sick), (1, {}), (2, sick), (1, {}))) == []
    (line,) = reported(history((6, {}), (9, sick)))
    assert line.startswith("step 9: ") and says in line


def test_a_run_that_an_earlier_version_began_has_nothing_to_compare_unused_experts_with() -> None:
    before = [
        {name: value for name, value in record.items() if name != "experts/unused"}
        for record in history((6, {}))
    ]
    after = [step(number, unused=0.4) for number in range(7, 12)]
    assert reported([*before, *after]) == []


def test_a_step_without_seconds_has_no_idle_share() -> None:
    assert reported(history((6, {"step_s": 0.0, "ranks_s": 0.0, "engines_s": 0.0}))) == []


def test_longer_responses_that_are_right_more_often_are_welcome() -> None:
    assert reported(history((6, {}), (9, {"length": 400.0, "accuracy": 0.6}))) == []


def test_a_policy_that_is_right_may_be_certain() -> None:
    certain = {
        "entropy": 0.01,
        "grad_norm": 0.01,
        "groups_without_variance": 0.98,
        "accuracy": 0.99,
        "std": 0.1,
    }
    assert reported(history((6, {}), (9, certain))) == []
    assert (
        len(
            reported(
                history((6, {}), (9, {**certain, "accuracy": 0.7, "groups_without_variance": 0.5}))
            )
        )
        == 1
    )


def test_a_condition_that_returns_is_reported_again_once_it_was_over() -> None:
    """A healthy step between two sick ones is chance: with few prompts all groups may be equal."""
    sick = {"grad_norm": 0.0}
    lines = reported(history((1, {}), (2, sick), (2, {}), (2, sick), (3, {}), (5, sick)))
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 11"]


def test_steps_without_a_metric_neither_show_nor_end_a_condition() -> None:
    """While only the critic learns there are no updates of the policy; a number may not be finite."""
    sick, bare = step(1, grad_norm=0.0), {"step": 2, "reward/mean": 0.5}
    later = [{"step": 3, "train/grad_norm": math.nan}, bare, bare, bare, step(6, grad_norm=0.0)]
    assert len(reported([sick, *later])) == 1
    before_training = [
        {"step": 0, "train/grad_norm": 0.0},
        {"step": 0, "warm_start/step": 1, "reward/std": 0.0},
    ]
    assert reported([*before_training, bare]) == []


def test_without_rewards_only_the_gradient_is_watched() -> None:
    """A teacher's students and demonstrations: rewards may be all equal, and certainty is what is learnt."""
    assert reported([equal(1, 0.0, grad_norm=1.0, entropy=0.0)], learns_from_rewards=False) == []
    (line,) = reported([{"step": 1, "train/grad_norm": 0.0}], learns_from_rewards=False)
    assert "train/grad_norm is 0" in line


def recorded(name: str) -> list[Metrics]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [("quickstart", 0.9), ("quickstart_tools", 0.85), ("dapo", 0.8), ("vapo", 0.6)],
)
def test_a_run_that_learns_is_healthy(name: str, accuracy: float) -> None:
    """The quickstarts, and the first of them with DAPO and VAPO in place of GRPO."""
    records = recorded(name)
    assert records[-1]["reward/accuracy"] > accuracy and len(records) >= 15
    assert reported(records) == []


def test_a_learning_rate_a_hundred_times_too_high_is_reported() -> None:
    (line,) = reported(recorded("lr_times_100"))
    assert line == (
        "step 2: every sample has the reward 0, so that rewards teach nothing, and train/grad_norm is 0; "
        "the mean reward was 0.676 in step 1: train.lr (0.1) is probably too high, try a tenth of it"
    )


healthy_steps = st.builds(
    step,
    number=st.just(1),
    mean=st.floats(0.5, 0.7),
    std=st.floats(0.25, 1),
    accuracy=st.floats(0.05, 0.95),
    groups_without_variance=st.floats(0, 0.9),
    grad_norm=st.floats(0.05, 10),
    entropy=st.floats(0.2, 1),
)
any_steps = st.builds(
    step,
    number=st.just(1),
    mean=st.sampled_from([0.0, 0.5, 1.0]),
    std=st.sampled_from([0.0, 0.3]),
    accuracy=st.sampled_from([0.0, 0.5, 1.0]),
    groups_without_variance=st.sampled_from([0.0, 0.97, 1.0]),
    grad_norm=st.sampled_from([0.0, 1e-6, 1.0, math.nan]),
    entropy=st.sampled_from([0.0, 1e-3, 0.5]),
)


def numbered(records: list[Metrics]) -> list[Metrics]:
    return [{**record, "step": number} for number, record in enumerate(records, start=1)]


@given(st.lists(healthy_steps, max_size=40))
def test_a_healthy_run_reports_nothing(records: list[Metrics]) -> None:
    assert reported(numbered(records)) == []


@given(st.lists(any_steps, max_size=30), st.integers(0, 30))
def test_a_run_that_resumes_reports_what_it_would_have_reported_without_the_stop(
    records: list[Metrics], kept: int
) -> None:
    records = numbered(records)
    resumed = Health(True).after_all(records[:kept])
    lines = []
    for record in records[kept:]:
        resumed, of_step = resumed.after(record)
        lines += of_step
    assert reported(records[:kept]) + lines == reported(records)


@given(st.lists(healthy_steps, min_size=1, max_size=10), st.integers(1, 30))
def test_a_run_that_stays_sick_is_reported_once(records: list[Metrics], num_sick: int) -> None:
    """By the first sick step, whatever was before it."""
    sick = equal(1, -2.0, entropy=0.5)
    lines = reported(numbered([*records, *[sick] * num_sick]))
    assert [line.split(":")[0] for line in lines] == [f"step {len(records) + 1}"]
