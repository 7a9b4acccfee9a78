"""One engine's worker: prompts in, scored groups and their summaries out."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe, RewardConfig
from megarl.placement.roles import engine_layout
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.rollout.sglang.batch_sizes import step_sequences
from megarl.rollout.sglang.engine import Engine, EngineError
from megarl.rollout.worker import RolloutWorker, scored
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.samples.summaries import summary
from megarl.types import (
    GroupSummary,
    Prompt,
    Sample,
    SampleGroup,
    SamplePart,
    UserError,
)
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling
from megarl.types.worker_faults import ServiceFaults, WorkerFaults
from tests.samples.responses import response

NOTHING = np.zeros(0, np.int64)
PROMPT = Prompt("rows.jsonl:1", "<user>1+2=<assistant>", (3, 6, 15, 7, 18, 4), "3", {"level": 1})


def recipe(model: str, reward: str = "megarl.rollout.rewards.exact:score") -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "test", "steps": 1, "seed": 11},
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
            "algorithm": {"name": "grpo"},
            "reward": {"function": reward},
            "rollout": {
                "prompts_per_step": 7,
                "samples_per_prompt": 4,
                "max_response_tokens": 8,
                "engine": {"count": 2, "tp": 2, "sglang": {"page_size": 1}},
            },
            "train": {"tp": 1, "lr": 1e-3},
            "placement": {"gpus": 4},
        }
    )


def test_an_engines_settings_come_from_the_recipe() -> None:
    run_recipe = recipe("somewhere")
    settings = engine_settings(run_recipe, index=1)
    assert (settings.dtype, settings.first_gpu, settings.context_tokens) == ("float32", 2, 40)
    assert settings.concurrency == 16, "an engine gets at most 4 of 7 prompts"
    assert not settings.load_weights
    assert settings.engine == run_recipe.rollout.engine
    assert settings.layout == engine_layout(run_recipe)


@pytest.mark.parametrize(
    ("algorithm", "rollout", "sequences"),
    [
        ({"name": "dapo"}, {}, 24),  # 11 prompts for 7 groups: an engine gets at most 6 of them
        ({"name": "dapo", "oversample": 3.0}, {}, 44),
        ({"name": "grpo"}, {"phase_tokens": 2, "prompts_in_flight": 14}, 28),
        ({"name": "remax"}, {}, 20),  # with the greedy sample
        ({"name": "ppo"}, {"samples_per_prompt": 1}, 4),
    ],
)
def test_an_engine_runs_a_step_at_once(
    algorithm: dict[str, Any], rollout: dict[str, Any], sequences: int
) -> None:
    tree = recipe("somewhere").model_dump() | {"algorithm": algorithm}
    tree["rollout"] |= rollout
    run_recipe = Recipe.model_validate(tree)
    assert (
        step_sequences(run_recipe) == engine_settings(run_recipe, index=0).concurrency == sequences
    )


@pytest.mark.parametrize(
    ("evaluation", "dp", "sequences"),
    [
        ({"max_prompts": 5}, 1, 16),  # the step is larger
        ({"max_prompts": 9, "samples": 6, "temperature": 1.0}, 1, 30),
        ({"max_prompts": 9, "sets": {"hard": {"samples": 6}}}, 1, 30),
        ({"max_prompts": 9, "samples": 5}, 2, 26),  # 13 of each group
    ],
)
def test_an_engine_runs_an_evaluation_at_once(
    evaluation: dict[str, Any], dp: int, sequences: int
) -> None:
    tree = recipe("somewhere").model_dump() | {"evaluation": evaluation}
    tree["rollout"]["engine"]["dp"] = dp
    tree["data"]["eval"] = {"easy": "easy.jsonl", "hard": "hard.jsonl"}
    run_recipe = Recipe.model_validate(tree)
    assert (step_sequences(run_recipe), engine_settings(run_recipe, index=0).concurrency) == (
        16,
        sequences,
    )


@pytest.mark.parametrize(
    ("replay", "seeded", "asked"), [("off", True, False), ("r2", False, False), ("r3", True, True)]
)
def test_an_engine_is_seeded_and_tells_its_experts_as_the_recipe_says(
    replay: str, seeded: bool, asked: bool
) -> None:
    tree = recipe("somewhere").model_dump()
    tree["rollout"]["seeded"] = seeded
    tree["train"]["replay"] = replay
    settings = engine_settings(Recipe.model_validate(tree), index=0)
    assert (settings.seeded, settings.routed_experts) == (seeded, asked)


def test_verifications_of_a_baseline_do_not_count() -> None:
    one, two, three = samples("a", "b", "c")
    greedy = replace(three, verifications=9, prefills=5, is_baseline=True)
    group_samples = replace(one, verifications=3), replace(two, verifications=4, prefills=2), greedy
    group = SampleGroup(PROMPT, group_samples, np.zeros(3, np.float32), np.zeros(3, np.bool_))
    assert (summary(group).verifications, summary(group).prefills) == (7, 3)


def test_the_source_of_a_group_is_what_its_row_says_in_the_recipes_column() -> None:
    """PROMPT has the column `level`."""
    for column, source in (("level", "1"), ("data_source", "")):
        reward = RewardConfig(function="a:b", source=column)
        short, _ = scored(PROMPT, samples("a"), [RIGHT], reward)
        assert short.source == source
    long = replace(PROMPT, row={"level": "x" * 1000})
    short, _ = scored(long, samples("a"), [RIGHT], RewardConfig(function="a:b", source="level"))
    assert short.source == "x" * 100


def samples(*texts: str) -> list[Sample]:
    return [
        response(PROMPT.token_ids, np.arange(1 + n), text=text, version=4)
        for n, text in enumerate(texts)
    ]


RIGHT, LATE, NAN = RewardResult(1.0, True), Failure("took longer than 5 s"), Failure("returned nan")


def score_all(
    drawn: Sequence[Sample],
    reward_results: Sequence[RewardResult | Failure],
    may_lose_all: bool = False,
    **keys: Any,
) -> tuple[GroupSummary, SampleGroup]:
    """keys: of the recipe's branch `reward`."""
    reward = RewardConfig(function="a:b", **keys)
    return scored(PROMPT, drawn, reward_results, reward, may_lose_all=may_lose_all)


def test_a_failed_reward_result_drops_its_sample() -> None:
    reward_results = [LATE, RIGHT, NAN, RewardResult(0.5, False)]
    short, kept = score_all(samples("a", "b", "c", "d"), reward_results)
    assert short.responses == tuple(sample.text for sample in kept.samples) == ("b", "d")
    assert short.response_lengths_G.tolist() == [2, 4]
    assert kept.rewards_G.tolist() == short.rewards_G.tolist() == [1.0, 0.5]
    assert kept.correct_G.tolist() == [True, False]
    assert short.num_dropped == 2
    assert short.failures == (
        "took longer than 5 s on response 'a' to rows.jsonl:1, answer '3'",
        "returned nan on response 'c' to rows.jsonl:1, answer '3'",
    )


def test_a_group_may_be_left_with_one_sample_but_not_with_none() -> None:
    short, kept = score_all(samples("a", "b"), [LATE, RIGHT])
    assert short.responses == ("b",) and len(kept.samples) == 1
    with pytest.raises(
        UserError, match="reward.function: took longer than 5 s on response 'a' to rows.jsonl:1"
    ):
        score_all(samples("a", "b"), [LATE, NAN])

    drawn, greedy = samples("a", "b")
    with pytest.raises(UserError, match="as did all of the group"):
        score_all([drawn, replace(greedy, is_baseline=True)], [LATE, RIGHT])


@pytest.mark.parametrize("texts", ["a", "abc"])
def test_an_evaluation_may_lose_all_answers_to_a_prompt(texts: str) -> None:
    short, kept = score_all(samples(*texts), [LATE] * len(texts), may_lose_all=True)
    assert kept.samples == () and short.responses == ()
    assert len(short.failures) == short.num_dropped == len(texts)


def test_a_failed_reward_result_may_be_penalised_or_stop_the_run() -> None:
    penalise = {"on_failure": "penalise", "penalty": -1.0}
    for reward_results, rewards in (([LATE, RIGHT], [-1.0, 1.0]), ([LATE, LATE], [-1.0, -1.0])):
        short, kept = score_all(samples("a", "b"), reward_results, **penalise)
        assert short.rewards_G.tolist() == rewards and not kept.correct_G[0]
        assert len(short.failures) == rewards.count(-1.0) and short.num_dropped == 0
    with pytest.raises(UserError, match="returned nan on response 'b'"):
        score_all(samples("a", "b"), [RIGHT, NAN], on_failure="stop")
    short, _ = score_all(samples("a"), [RIGHT], on_failure="stop")
    assert short.failures == ()


class Phases:
    """An engine whose samples of 1, 3 and 5 tokens go on by two tokens in a phase."""

    LENGTHS = 1, 3, 5

    def __init__(self) -> None:
        self.version = 0

    async def generate(
        self, prompt_ids: Any, sampling: Sampling, begun: Sequence[Sample] = ()
    ) -> list[Sample]:
        self.version += 1
        return [
            self.continued(
                place, begun[place] if begun else response(prompt_ids, NOTHING, is_open=True)
            )
            for place in range(len(self.LENGTHS))
        ]

    def continued(self, place: int, sample: Sample) -> Sample:
        if not sample.is_open:
            return sample
        row, length = sample.only_row, self.LENGTHS[place]
        now = min(row.num_trained + 2, length)
        parts = (*row.parts, SamplePart(self.version, now - row.num_trained))
        is_open = now < length
        return response(
            row.prompt_ids,
            np.arange(now),
            text="" if is_open else "x" * length,
            finished=not is_open,
            parts=parts,
            is_open=is_open,
        )


def phased_worker(reward_workers: Any, reward: RewardConfig) -> RolloutWorker:
    """A worker whose engine is scripted."""
    worker = RolloutWorker.__new__(RolloutWorker)
    worker.__dict__.update(
        _engine=Phases(),
        _episodes=None,
        _num_transcripts=1,
        _reward=reward,
        _reward_workers=reward_workers,
        _runtime=None,
    )
    return worker


def test_reward_results_come_as_samples_end_and_decide_when_all_have() -> None:
    """A failed verdict drops its sample at the end, so that the others keep their places and random numbers."""
    asked: list[list[str]] = []

    async def reward_results(
        answer: str, row: Any, responses: list[str], episodes: list[Any]
    ) -> list[RewardResult | Failure]:
        asked.append(responses)
        assert episodes == [None] * len(responses), "these are none"
        return [
            LATE if text == "xxx" else RewardResult(float(len(text)), True) for text in responses
        ]

    faults = WorkerFaults(1, (ServiceFaults("judge", retries=2),))
    workers = SimpleNamespace(
        reward_results=reward_results, take_faults=lambda: faults, take_worked_s=lambda: 2.5
    )
    worker = phased_worker(workers, RewardConfig(function="a:b"))
    sampling, group = Sampling(3, 5, phase_tokens=2), None
    for num_open, tokens in ((2, 2), (1, 4)):
        short, group = asyncio.run(worker.sample(PROMPT, sampling, group))
        assert short == PartialSummary(num_open, len(PROMPT.token_ids) + tokens)
        assert isinstance(group, PartialGroup)
    assert group is not None and group.reward_results == (RewardResult(1.0, True), LATE, None)
    worker._reward = RewardConfig(function="a:b", on_failure="stop")
    with pytest.raises(UserError, match="took longer than 5 s on response 'xxx'"):
        asyncio.run(
            worker.sample(PROMPT, sampling, replace(group, reward_results=(RIGHT, None, None)))
        )
    worker._reward = RewardConfig(function="a:b")
    short, whole = asyncio.run(worker.sample(PROMPT, sampling, group))
    assert isinstance(short, GroupSummary) and isinstance(whole, SampleGroup)
    assert [asked[place] for place in (0, 1, 3)] == [["x"], ["xxx"], ["xxxxx"]], (
        "each response once"
    )
    assert short.reward_worker_s == 2.5
    assert (short.responses, short.rewards_G.tolist(), short.num_dropped) == (
        ("x", "xxxxx"),
        [1.0, 5.0],
        1,
    )
    assert short.faults == {"reward": faults}
    assert short.parts_G == (
        (SamplePart(1, 1),),
        (SamplePart(1, 2), SamplePart(2, 2), SamplePart(4, 1)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["stop", "drop", "penalise"])
def test_a_judge_that_is_down_for_a_whole_phase_costs_what_the_recipe_says(
    judges: Callable[..., RewardWorkers], on_failure: str
) -> None:
    """Nobody listens at its address: the phase ends, or the run with the cause."""
    arguments = {"url": "http://127.0.0.1:1", "model": "m", "timeout_s": 2.0}
    keys: dict[str, Any] = {"timeout_s": 10.0, "arguments": arguments, "workers": 1}
    function = "megarl.rollout.rewards.llm_judge:score"
    keys |= {"on_failure": on_failure, "penalty": -1.0 if on_failure == "penalise" else 0.0}
    workers = judges(function, **keys)
    worker = phased_worker(workers, RewardConfig(function=function, **keys))
    prompt = replace(PROMPT, row={"prompt": "1+2="})

    async def phase() -> list[Any]:
        sampled = [worker.sample(prompt, Sampling(3, 5)) for _ in range(100)]
        return await asyncio.gather(*sampled, return_exceptions=True)

    worker._engine = SimpleNamespace(generate=generate_three)  # type: ignore[assignment]
    groups = asyncio.run(phase())
    if on_failure == "penalise":
        assert all(short.rewards_G.tolist() == [-1.0] * 3 for short, _ in groups)
        lost = [part for short, _ in groups for part in short.faults["reward"].services]
        assert sum(part.lost for part in lost) == 300
        assert sum(part.outages for part in lost) == 1
        return
    for error in groups:
        assert isinstance(error, UserError) and error.where == "reward.function"
        assert "raised JudgeError: no verdict: 127.0.0.1:1 " in error.problem
        # on a busy machine the time for an answer may be over before it is known that nobody listens
        assert re.search("ConnectError|has not answered|within 2 s on ", error.problem), (
            error.problem
        )


async def generate_three(*_: Any) -> list[Sample]:
    return samples("x", "xx", "xxx")


def test_a_bad_reward_stops_a_worker_before_its_engine_starts() -> None:
    with pytest.raises(UserError, match="no_such_module"):
        RolloutWorker(recipe("somewhere", reward="no_such_module:score"), 0)


@pytest.mark.slow
def test_a_worker_samples_once_it_has_weights(
    checkpoint: Path, fork_server: None, loader_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = functools.partial(Engine, weight_loader=loader_path)
    monkeypatch.setattr("megarl.rollout.worker.Engine", engine)
    worker = RolloutWorker(recipe(str(checkpoint)), 0)
    try:
        assert gc.get_freeze_count() > 100_000, "collections do not look at what was imported"
        assert worker.version() == -1
        with pytest.raises(EngineError, match="no weights"):
            asyncio.run(worker.sample(PROMPT, Sampling(4, 8)))
        asyncio.run(worker.reshard({}, 0))
        short, group = asyncio.run(worker.sample(PROMPT, Sampling(4, 8)))
    finally:
        worker.shutdown()
    assert isinstance(short, GroupSummary) and isinstance(group, SampleGroup)
    assert group.rewards_G.tolist() == [sample.text.strip() == "3" for sample in group.samples]
    assert {part.version for parts in short.parts_G for part in parts} == {0}
    assert short.responses == tuple(sample.text for sample in group.samples)


def test_a_greedy_sample_is_drawn_beside_the_others_and_marked() -> None:
    asked: list[tuple[int, float]] = []

    async def generate(_: Any, sampling: Sampling) -> list[Sample]:
        asked.append((sampling.num_samples, sampling.temperature))
        return samples(*"abc"[: sampling.num_samples])

    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._episodes = None
    worker._engine = SimpleNamespace(generate=generate)
    generated = asyncio.run(worker._generate(PROMPT, Sampling(3, 5, 0.7, with_baseline=True), None))
    assert asked == [(3, 0.7), (1, 0.0)] and generated.reward_results == [None] * 4
    assert [sample.is_baseline for sample in generated.samples] == [False, False, False, True]
