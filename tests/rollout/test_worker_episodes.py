"""One engine's worker with episodes: how long they may be, what failed ones are worth, and open ones between phases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe, RewardConfig
from megarl.config.episode import EpisodeConfig
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.worker import RolloutWorker, scored
from megarl.samples import accounting
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.types import (
    EpisodeFacts,
    GroupSummary,
    Prompt,
    Sample,
    SampleGroup,
    UserError,
)
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling
from megarl.types.worker_faults import WorkerFaults
from scripts.make_tiny_moe import make_tokenizer
from tests.episodes.test_open_episode import Model
from tests.rollout.test_worker import PROMPT, recipe
from tests.samples.responses import response

WALK = "tests.episodes.walk:Walk"


def with_episodes(max_tokens: int, **evaluation: int) -> Recipe:
    """evaluation: keys of one evaluation set."""
    tree = recipe("somewhere").model_dump()
    tree["episode"] = {"environment": WALK, "max_tokens": max_tokens}
    tree["data"]["eval"], tree["evaluation"] = {"own": "own.jsonl"}, {"sets": {"own": evaluation}}
    return Recipe.model_validate(tree)


@pytest.mark.parametrize("evaluation", [{}, {"max_response_tokens": 500}])
def test_an_engine_has_room_for_a_prompt_and_an_episode(evaluation: dict[str, int]) -> None:
    """Whatever a turn may have, also in an evaluation set whose turns may be longer than an episode."""
    assert engine_settings(with_episodes(100, **evaluation), index=0).context_tokens == 32 + 100
    without = with_episodes(100, **evaluation).model_copy(update={"episode": None})
    assert engine_settings(without, index=0).context_tokens == 32 + evaluation.get(
        "max_response_tokens", 8
    )


# --- failed environments -----------------------------------------------------------------------------------------


def failed(tokens: int) -> Sample:
    """An episode whose environment has failed after so many sampled tokens."""
    facts = EpisodeFacts(int(tokens > 0), 0, 0, 0.1, "environment", tokens)
    ids_T = np.arange(tokens, dtype=np.int64)
    logp_T = np.full(tokens, -1.0, np.float32)
    return response((1, 2), ids_T, logp_T, "so", finished=False, version=4, facts=facts)


def answered(tokens: int) -> Sample:
    sample = failed(tokens)
    assert sample.facts
    return replace(sample, finished=True, facts=replace(sample.facts, end="answered"))


GONE, RIGHT = Failure("reset raised ValueError: no row"), RewardResult(1.0, True)


def test_a_failed_environment_is_penalised_where_the_model_has_sampled_anything() -> None:
    """An episode without a token has nothing to train on: it is dropped, and counts as failed all the same."""
    samples, penalise = (
        [failed(3), failed(0), answered(2)],
        RewardConfig(on_failure="penalise", penalty=-1.0),
    )
    short, kept = scored(PROMPT, samples, [GONE, GONE, RIGHT], penalise)
    assert (short.rewards_G.tolist(), short.correct_G.tolist()) == ([-1.0, 1.0], [False, True])
    assert kept.samples == (samples[0], samples[2]) and short.response_lengths_G.tolist() == [3, 2]
    assert short.num_dropped == 1 and len(short.failures) == 2
    assert [facts.end for facts in short.facts if facts] == ["environment", "answered"]


def test_a_group_of_failed_environments_without_a_token_is_the_users_fault() -> None:
    """Under penalise, too: the key that names the environment is told, because no function was asked."""
    penalise = RewardConfig(on_failure="penalise", penalty=-1.0)
    with pytest.raises(UserError, match="as did all of the group") as raised:
        scored(PROMPT, [failed(0), failed(0)], [GONE, GONE], penalise)
    assert (
        raised.value.where == "episode"
        and "reset raised ValueError: no row" in raised.value.problem
    )
    short, kept = scored(PROMPT, [failed(0), failed(0)], [GONE, GONE], penalise, may_lose_all=True)
    assert kept.samples == () and short.num_dropped == 2


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_failed_environment_may_stop_the_run(tokens: int) -> None:
    with pytest.raises(UserError, match="reset raised ValueError: no row") as raised:
        scored(
            PROMPT, [answered(2), failed(tokens)], [RIGHT, GONE], RewardConfig(on_failure="stop")
        )
    assert raised.value.where == "episode" and "as did all" not in raised.value.problem


# --- phases ------------------------------------------------------------------------------------------------------


class Places(Model):
    """Samples the turns that are given for each place, and notes whom it was asked for."""

    def __init__(self, tokenizer: Any, turns: Mapping[int, Sequence[str]]) -> None:
        super().__init__(tokenizer, ())
        self.of_place, self.asked = turns, list[int]()

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        self.asked.append(place)
        self.turns = list(self.of_place[place])  # read before anything is awaited
        return await super().turn(conversation, number, context_ids, sampling, place, rows)


@pytest.fixture(scope="module")
def walks() -> Iterator[EnvironmentThread]:
    thread = EnvironmentThread(EnvironmentSettings(environment=WALK, workers=1))
    yield thread
    thread.shutdown()


def worker_of(
    walks: EnvironmentThread, turns: Mapping[int, Sequence[str]]
) -> tuple[RolloutWorker, Places, Prompt]:
    """A worker whose engine is scripted, and whose environments are real."""
    tokenizer: Any = make_tokenizer(tools=True)
    turn_tokenizer = TurnTokenizer(tokenizer, [tokenizer.eos_token_id], walks.schemas)
    config, model = (
        EpisodeConfig(environment=WALK, max_turns=2, max_tokens=120),
        Places(tokenizer, turns),
    )
    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._episodes = EpisodeRunner(
        config, model, walks, turn_tokenizer, None, max_prompt_tokens=60
    )
    worker._reward, worker._num_transcripts = RewardConfig(), 9
    worker._reward_workers = SimpleNamespace(  # there is no function
        take_faults=WorkerFaults, take_worked_s=lambda: None
    )
    worker._runtime = walks
    return (
        worker,
        model,
        Prompt("row 1", "", tuple(turn_tokenizer.first("go")), "", {"opening": "begin"}, "go"),
    )


def test_the_next_phase_finishes_the_episodes_that_one_leaves_open(
    walks: EnvironmentThread,
) -> None:
    """Of three the first ends in the first phase, and is not asked for again; the group is that of one phase."""
    turns = {0: ["a", "b"], 1: ["go on and on and on", "b"], 2: ["a", "over there, to the end"]}
    worker, model, prompt = worker_of(walks, turns)
    sampling = Sampling(3, 30, stream=(1, 2), phase_tokens=15)
    short, begun = asyncio.run(worker.sample(prompt, sampling))
    assert isinstance(begun, PartialGroup) and isinstance(short, PartialSummary)
    assert [sample.is_open for sample in begun.samples] == [False, True, True]
    assert begun.reward_results == (RewardResult(0.5, False), None, None)
    longest = max(accounting.longest_row(sample) for sample in begun.samples[1:])
    assert short == PartialSummary(2, longest)
    model.version, model.asked, model.completed = 1, [], []
    short, group = asyncio.run(worker.sample(prompt, sampling, begun))
    assert isinstance(short, GroupSummary) and isinstance(group, SampleGroup)
    assert (
        set(model.asked) == {1, 2}
        and [assigned for _, assigned, _ in model.completed] == [longest] * 2
    )
    whole_worker, *_ = worker_of(walks, turns)
    whole, same = asyncio.run(whole_worker.sample(prompt, replace(sampling, phase_tokens=None)))
    assert isinstance(whole, GroupSummary) and isinstance(same, SampleGroup)
    for phased_sample, other in zip(group.samples, same.samples, strict=True):
        for row, same_row in zip(phased_sample.rows, other.rows, strict=True):
            np.testing.assert_array_equal(row.response_ids_T, same_row.response_ids_T)
            np.testing.assert_array_equal(row.trained_T, same_row.trained_T)
    for name in ("response_lengths_G", "rewards_G", "correct_G", "finished_G", "turn_rewards_G"):
        np.testing.assert_array_equal(getattr(short, name), getattr(whole, name))
    assert (short.responses, short.transcripts) == (whole.responses, whole.transcripts)
    assert [facts.end for facts in short.facts if facts] == ["max_turns"] * 3
    versions = [[part.version for part in parts] for parts in short.parts_G]
    assert versions == [[0], [0, 1], [0, 1]] and short.num_dropped == 0
