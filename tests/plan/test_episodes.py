"""Plans of episodes: what their tokens cost, by hand, and what cannot work is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.config.loading import overlaid
from megarl.placement.roles import Roles, resolve
from megarl.plan.batch import Samples, step_samples
from megarl.plan.engine_simulation import (
    GroupLimits,
    OfGroups,
    SimulatedEngine,
    SimulatedRequest,
    simulate,
)
from megarl.plan.phase_advice import phase_advice
from megarl.plan.report import amount, page, plan_json
from megarl.plan.rollout_time import NO_ROLLOUT, whole_requests
from megarl.plan.run_plan import RunPlan, make_plan
from megarl.plan.turns import (
    MOST_OBSERVED_SHARE,
    TURN_S,
    ToolLoad,
    Turns,
    timeout_advice,
    tool_load,
    tools_bytes,
    turns_of,
)
from megarl.preflight.checks_by_command import plan_errors
from megarl.preflight.hyperparameter_checks import hyperparameter_errors
from megarl.preflight.model_checks import stand_ins
from tests.plan import recipes as planning

EPISODE = {
    "tools": ("megarl.environments.calculator:calculate",),
    "max_turns": 8,
    "max_tokens": 4000,
    "max_observation_tokens": 200,
    "workers": 3,
    "memory_mb": 512,
}


@dataclass(frozen=True)
class Squares:
    """A step takes a second; reading n tokens takes n squared milliseconds, as attention alone would."""

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        return 1.0

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        return tokens**2 / 1000, 0.0


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return with_episode(planning.small(tmp_path))


def with_episode(recipe: Recipe, **keys: object) -> Recipe:
    return overlaid(recipe, {"episode": EPISODE | keys, "train": {"tokens_per_micro_batch": 8192}})


def roles(recipe: Recipe) -> Roles:
    return resolve(stand_ins(recipe)[0])


def run(request: SimulatedRequest, cache: int = 10_000) -> SimulatedEngine:
    engine = SimulatedEngine(GroupLimits(1, 4, cache, 4000), Squares())
    engine.submit(request, 0)
    simulate([engine], lambda *_: None)
    return engine


def test_the_supposed_turns_by_hand(recipe: Recipe) -> None:
    """Four turns have three observations of 100 tokens; in an episode of 1,600 these are 3/16."""
    turns = turns_of(recipe, 1600.0)
    assert (turns.mean, turns.most, turns.observed_tokens) == (4.0, 8, 300.0)
    assert [turns.turns_of(tokens) for tokens in (100, 1600, 3200, 9999)] == [1, 4, 7, 8]
    assert [turns.observed_of(tokens) for tokens in (100, 1600)] == [0, 300]
    assert turns_of(recipe, 10.0).observed_share == MOST_OBSERVED_SHARE, "something is sampled"


def test_a_recipe_without_episodes_has_one_turn_and_observes_nothing(tmp_path: Path) -> None:
    recipe = planning.small(tmp_path)
    turns = step_samples(recipe).turns
    assert (turns.turns_of(10**6), turns.observed_of(10**6), tools_bytes(recipe)) == (1, 0, 0)


def test_the_longest_sample_is_an_episode(recipe: Recipe) -> None:
    samples = step_samples(recipe)
    assert samples.longest == recipe.data.max_prompt_tokens + 4000
    assert samples.responses.max() == 4000
    assert samples.responses.mean() == pytest.approx(1600, rel=0.01)
    assert samples.sampled_tokens == pytest.approx(samples.responses.sum() * (1 - 3 / 16), rel=0.01)


def test_observations_are_read_and_not_sampled() -> None:
    """Two of 10 tokens, each after half of the sequence: 100 + 60 / 2; sampled are 40, and the cache holds all."""
    engine = run(SimulatedRequest(100, 40, observed_tokens=20, turns=3))
    assert (engine.step, engine.tokens) == (40, [160])
    assert engine.prefill_s == pytest.approx((100**2 + 2 * (140**2 - 130**2)) / 1000)
    assert run(SimulatedRequest(100, 40, shares_prompt=True)).prefill_s == 0


def test_every_token_of_an_episode_is_sampled_or_read() -> None:
    lengths = np.arange(1, 41) * 10
    samples = Samples(10, 10, 40, 40, 50, 450, lengths, Turns(3.0, 5, 0.25, float(lengths.mean())))
    requests = whole_requests(samples, 1, 1)
    assert [request.added_tokens for request in requests] == lengths.tolist()
    assert all(request.observed_tokens == 0 or request.turns > 1 for request in requests)
    assert sum(request.observed_tokens for request in requests) == pytest.approx(
        0.25 * lengths.sum(), rel=0.05
    )


def test_what_cannot_work_is_told(recipe: Recipe) -> None:
    assert not plan_errors(roles(recipe))
    short = overlaid(
        recipe, {"episode": {"max_tokens": 4}, "rollout": {"ahead": 1, "max_response_tokens": 8}}
    )
    assert {"episode.max_tokens", "rollout.ahead"} <= {
        error.where for error in plan_errors(roles(short))
    }
    narrow = overlaid(recipe, {"train": {"tokens_per_micro_batch": 2048}})
    (error,) = plan_errors(roles(narrow))
    assert error.where == "train.tokens_per_micro_batch" and "episode.max_tokens" in error.problem


def test_no_phases_are_advised_which_episodes_do_not_take(recipe: Recipe) -> None:
    def never(_: Recipe) -> None:
        raise AssertionError("it is not tried")

    assert phase_advice(recipe, never, may_be_ahead=True) == []


@pytest.mark.parametrize(("name", "is_read"), [("reinforce_pp", True), ("grpo", False)])
def test_turns_with_rewards_read_the_discount(name: str, is_read: bool, recipe: Recipe) -> None:
    keys = {"name": name, "gamma": 0.9, "kl_coefficient": 0.0}
    changed = overlaid(recipe, {"algorithm": keys})
    gamma = [error for error in hyperparameter_errors(changed) if error.where == "algorithm.gamma"]
    assert bool(gamma) != is_read
    without = overlaid(changed, {"episode": None})
    assert [error for error in hyperparameter_errors(without) if error.where == "algorithm.gamma"]


@pytest.mark.parametrize(
    ("keys", "call_s", "limit"),
    [
        ({}, 10.0, "episode.call_timeout_s"),
        ({"arguments": {"timeout_s": 4}}, 4.0, "episode.arguments.timeout_s"),
        ({"arguments": {"timeout_s": 30.0}}, 10.0, "episode.call_timeout_s"),
        (
            {"arguments": {"timeout_s": "soon"}, "call_timeout_s": 2.5},
            2.5,
            "episode.call_timeout_s",
        ),
        ({"arguments": {"timeout_s": 0}}, 10.0, "episode.call_timeout_s"),
    ],
)
def test_the_cores_of_tools_by_hand(
    recipe: Recipe, keys: dict[str, object], call_s: float, limit: str
) -> None:
    """Each of 40 episodes of 4 turns has 3 calls, in a rollout of 100 s."""
    load = tool_load(with_episode(recipe, **keys), Turns(4.0, 8, 0.2, 1600.0), 40)
    assert load and load == ToolLoad(120.0, call_s, limit)
    assert (load.calls_per_s(100.0), load.cores(100.0)) == (1.2, pytest.approx(1.2 * call_s))


def test_no_cores_are_known_without_tools(recipe: Recipe) -> None:
    agent = with_episode(recipe, tools=(), agent="my_agent:run")
    assert tool_load(agent, Turns(4.0), 40) is None, "no key limits an agent's own"
    assert tool_load(overlaid(recipe, {"episode": None}), Turns(), 40) is None


def page_calls(plan: RunPlan) -> str:
    """Three of a mean episode's four turns call tools."""
    calls = 3 * plan.samples.num_drawn
    return f"{calls:,}, {amount(calls / plan.rollout.total_s)}"


def test_a_time_that_ends_long_episodes_is_advised_against(recipe: Recipe) -> None:
    """64 sequences in each of two engines, 640 tokens a second: a step takes 0.2 s, and 2,000 of them 400 s."""
    rollout = replace(
        NO_ROLLOUT, decode_s=500.0, running=64, tokens_per_s=640.0, longest=2000, turns_s=1.0
    )
    assert rollout.longest_s(2) == pytest.approx(401.0)
    assert replace(rollout, decode_s=300.0).longest_s(2) == 301.0, "not longer than the rollout"
    assert NO_ROLLOUT.longest_s(2) == 0.0
    (line,) = timeout_advice(recipe, 401.0)
    assert (
        line.startswith("episode.timeout_s: 300 s after its first turn") and "up to 401 s" in line
    )
    assert not timeout_advice(recipe, 300.0)
    assert not timeout_advice(overlaid(recipe, {"episode": None}), 401.0)


@pytest.mark.slow
def test_the_plan_of_episodes(recipe: Recipe) -> None:
    """Two engines on two nodes: of each node's host the three processes of one."""
    plan = make_plan(recipe, load_hardware(planning.H800))
    assert plan.memory.host["tools"] == tools_bytes(recipe) == 3 * 512 * 2**20
    assert plan.rollout.turns_s == pytest.approx(TURN_S * (plan.samples.turns.turns_of(4000) - 1))
    assert plan.rollout.longest < 4000, "its observations are not sampled"
    assert plan.rollout.total_s >= plan.rollout.alone_s > plan.rollout.turns_s
    episodes = plan_json(plan)["episodes"]
    assert (episodes["mean"], episodes["most"]) == (4.0, 8)
    lines = {"mean (assumed) and maximum": "4.00, 8", "worker processes of tools": "6"}
    lines["turns of a step that call tools"] = page_calls(plan)
    cores = 10 * 3 * plan.samples.num_drawn / plan.rollout.total_s
    lines["every call used its whole 10 s (episode.call_timeout_s)"] = amount(cores)
    assert (episodes["tools"]["calls"], episodes["tools"]["cores"]) == (
        3 * plan.samples.num_drawn,
        pytest.approx(cores),
    )
    assert episodes["tools"]["cores"] == pytest.approx(10 * episodes["tools"]["calls_per_s"])
    for name, value in lines.items():
        (line,) = (line for line in page(plan).splitlines() if name in line)
        assert line.split(name)[1].endswith(f" {value}")
