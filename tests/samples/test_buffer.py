"""The phases of a run on planted response lengths: which groups a step trains on, how old they are, what is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.controller.samples import Limits, staleness
from megarl.controller.step_rollout import StepRollout
from megarl.fleet.rank_groups import GroupBuffer
from megarl.samples.buffer import PartialSummary, num_phases, staleness_bound
from megarl.tracking.run_log import Record
from megarl.types import (
    GroupSummary,
    Hyperparameters,
    PhaseBalance,
    Prompt,
    SamplePart,
    UserError,
    with_part,
)
from megarl.types.sampling import Sampling
from tests.controller.test_loop import QUICKSTART
from tests.samples.responses import response_rows

RECIPE = load_recipe(QUICKSTART)
PROMPT_TOKENS = 3
Lengths = Callable[[int], Sequence[int]]  # the responses' of a ticket


def recipe_of(
    longest: int, phase: int | None, wanted: int, in_flight: int | None, ahead: int = 0
) -> Recipe:
    keys = {"max_response_tokens": longest, "phase_tokens": phase, "prompts_per_step": wanted}
    keys |= {"prompts_in_flight": in_flight, "samples_per_prompt": 2, "ahead": ahead}
    return RECIPE.model_copy(update={"rollout": RECIPE.rollout.model_copy(update=keys)})


@dataclass
class Run:
    """Steps with a stand-in for the engines, which gives each open sample `phase` tokens or as many as it lacks.

    is_mixed: of a ticket, whether it has right and wrong answers. steps: of the run, which has a start and an end;
    None: it begins with as many in flight as may be, and has no end.
    """

    lengths: Lengths
    recipe: Recipe
    hyperparameters: Hyperparameters = Hyperparameters()  # noqa: RUF009
    is_mixed: Callable[[int], bool] = lambda number: True
    version: int = 0
    buffer: GroupBuffer = field(default_factory=GroupBuffer)
    # of each sample of a ticket
    parts: dict[int, list[tuple[SamplePart, ...]]] = field(default_factory=dict)
    phases: int = 0
    streams: list[tuple[int, ...]] = field(default_factory=list)  # of the tickets that were begun
    steps: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)  # of the latest step

    def __post_init__(self) -> None:
        rollout = self.recipe.rollout
        if self.steps is None:
            self.buffer = replace(self.buffer, surplus=rollout.in_flight - rollout.prompts_per_step)

    def take(self, count: int) -> list[Prompt]:
        return [Prompt("", "", (1,) * PROMPT_TOKENS, "")] * count

    @property
    def num_engines(self) -> int:
        return 1

    @property
    def have_own_gpus(self) -> bool:
        return False

    def begin(
        self, entries: Sequence[Any], sampling: Sampling, *, beside_training: bool = False
    ) -> Any:
        """The round of a phase, which has the weights of now, whenever its result is asked for.

        Its entries come in another order than that of their numbers.
        """
        self.phases += 1
        self.streams += [entry.stream for entry in entries if entry.ref is None]
        advanced = [self.advanced(entry) for entry in reversed(entries)]
        balance = PhaseBalance((1,), tail_s=0.0, idle_s=0.0, seconds=0.0)
        return SimpleNamespace(result=lambda: (advanced, balance), sampled_s=0.0)

    def advanced(self, entry: Any) -> Any:
        number, phase = entry.number, self.recipe.rollout.phase_tokens or 10**9
        lengths, parts = self.lengths(number), self.parts.setdefault(number, [(), ()])
        for sample, length in enumerate(lengths):
            left = length - sum(part.num_tokens for part in parts[sample])
            if left:
                parts[sample] = with_part(parts[sample], SamplePart(self.version, min(phase, left)))
        done = [sum(part.num_tokens for part in sample_parts) for sample_parts in parts]
        still = [n for n, length in zip(done, lengths, strict=True) if n < length]
        if still:
            assert len(set(still)) == 1, "open samples are equally long"
            return replace(
                entry, summary=PartialSummary(len(still), PROMPT_TOKENS + still[0]), ref=number
            )
        correct_G = np.array([True, not self.is_mixed(number)])
        summary = GroupSummary(
            "",
            "",
            ("", ""),
            response_rows(PROMPT_TOKENS, parts),
            np.ones(2, np.bool_),
            correct_G.astype(np.float32),
            correct_G,
        )
        return replace(entry, summary=summary, ref=number)

    def step(self) -> tuple[list[int], dict[str, float]]:
        """The tickets that are trained on, and how old their tokens are."""
        rollout = self.recipe.rollout
        is_phased = rollout.phase_tokens is not None
        left = None if self.steps is None else self.steps - self.version - 1
        sizes = rollout.prompts_per_step, rollout.in_flight
        limits = Limits(
            *sizes, self.hyperparameters, rollout.ahead, is_phased=is_phased, steps_left=left
        )
        fleet: Any = self
        rollout = StepRollout(self.recipe, limits, fleet, fleet, self.version + 1, lambda: None)
        bound = max(staleness_bound(self.recipe, self.hyperparameters), self.buffer.loaded_bound)
        collected = rollout.collect(self.buffer)
        groups = collected.chosen
        ahead = None if left == 0 else rollout.begin_next(collected)
        ages = staleness(groups.summaries, self.version, bound)
        self.version += 1
        record = Record(self.version)
        self.buffer = rollout.finish(collected, ahead, record)
        self.metrics = record.metrics
        self.buffer.check()
        numbers: Any = groups.refs
        assert all(len(self.lengths(n)) == 2 for n in numbers)
        for number, summary in zip(numbers, groups.summaries, strict=True):
            assert summary.response_lengths_G.tolist() == list(self.lengths(number)), (
                "no sample is trained on cut"
            )
        return numbers, ages


def oldest(run: Run, steps: int) -> int:
    return int(max(run.step()[1].get("stale/token_max", 0) for _ in range(steps)))


def test_a_straggler_goes_on_while_steps_train_on_the_others() -> None:
    """Ticket 1 takes four phases; of two tickets a step the others are done in one."""
    run = Run(lambda number: (16, 2) if number == 1 else (3, 4), recipe_of(16, 4, 2, 4))
    trained = [run.step()[0] for _ in range(4)]
    assert trained == [[0, 2], [3, 4], [5, 6], [1, 7]]
    assert run.parts[1] == [
        tuple(SamplePart(version, 4) for version in range(4)),
        (SamplePart(0, 2),),
    ]
    assert run.phases == 4, "one a step"


def test_without_phases_every_token_is_of_the_policy() -> None:
    run = Run(lambda number: (16, 2) if number == 1 else (3, 4), recipe_of(16, None, 2, None))
    assert [run.step()[0] for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert staleness_bound(run.recipe, Hyperparameters()) == 0 and num_phases(run.recipe) == 1


def test_ahead_a_step_begins_with_a_phase_of_the_weights_before() -> None:
    """The same tickets as without: the first phase of a step is a version older, and streams are the step's."""
    runs = [
        Run(lambda number: (3, 1 + number % 4), recipe_of(4, 2, 2, 4, steps_ahead))
        for steps_ahead in (0, 1)
    ]
    plain, trained = ([run.step()[0] for _ in range(4)] for run in runs)
    assert plain == trained
    ahead = Run(lambda number: (16, 16), recipe_of(16, None, 2, None, 1))
    steps = [ahead.step() for _ in range(3)]
    assert [numbers for numbers, _ in steps] == [[0, 1], [2, 3], [4, 5]]
    assert [ages["stale/token_max"] for _, ages in steps] == [0, 1, 1]
    assert ahead.phases == 4, "one before the first step"
    seed = ahead.recipe.run.seed
    assert ahead.streams[2:] == [(seed, step, place) for step in (2, 3, 4) for place in (0, 1)]


def test_ahead_prompts_that_a_step_draws_itself_have_streams_from_round_1_on() -> None:
    """Of the four that were drawn ahead for step 2 two have groups of right answers alone."""
    hyperparameters = Hyperparameters(dynamic_sampling=True, oversample=1.0)
    run = Run(
        lambda number: (2, 2),
        recipe_of(4, None, 4, None, 1),
        hyperparameters,
        lambda number: number not in (5, 6),
    )
    assert [run.step()[0] for _ in range(2)] == [[0, 1, 2, 3], [4, 7, 8, 9]]
    rounds = [stream[1:-1] for stream in run.streams]
    assert rounds == [(1, 1)] * 4 + [(2,)] * 4 + [(2, 1)] * 2 + [(3,)] * 4


def stragglers(first: int, end: int) -> Lengths:
    """Tickets of these numbers take four phases, the others one."""
    return lambda number: (16, 1) if first <= number < end else (2, 2)


DYNAMIC = Hyperparameters(dynamic_sampling=True, oversample=1.0)


@pytest.mark.parametrize(
    ("recipe", "lengths", "hyperparameters", "reached", "bound"),
    [
        (recipe_of(16, 4, 2, 4), lambda number: (16, 16), Hyperparameters(), 1, 3),  # four phases of one step
        (recipe_of(16, 4, 2, 4), lambda number: (1, 2), Hyperparameters(), 1, 3),  # what waits is trained on first
        (recipe_of(16, 4, 2, 4), stragglers(0, 1), Hyperparameters(), 3, 3),
        (recipe_of(16, 4, 2, 6), stragglers(0, 3), Hyperparameters(), 4, 4),
        (recipe_of(16, 4, 2, 4, 1), stragglers(8, 9), Hyperparameters(), 4, 4),  # which is begun ahead
        (recipe_of(16, 4, 2, 6), stragglers(0, 3), DYNAMIC, 4, 4),
        (recipe_of(16, 4, 2, 6), stragglers(0, 3), replace(DYNAMIC, when_short="stop"), 4, 4),
    ],
    ids=["longest", "short", "one", "three", "ahead", "dynamic", "stop"],
)  # fmt: skip
def test_the_bound_is_reached_by_planted_lengths(
    recipe: Recipe, lengths: Lengths, hyperparameters: Hyperparameters, reached: int, bound: int
) -> None:
    assert oldest(Run(lengths, recipe, hyperparameters), 12) == reached
    assert staleness_bound(recipe, hyperparameters) == bound


@pytest.mark.parametrize(
    ("wanted", "in_flight", "oversample"), [(2, 8, 1.0), (3, 9, 1.5), (1, 4, 2.0)]
)
def test_groups_that_were_loaded_wait_for_steps_of_another_size(
    wanted: int, in_flight: int, oversample: float
) -> None:
    """The bound of complete groups comes from themselves: eight groups a step, and what those leave, then fewer."""
    before = Hyperparameters(dynamic_sampling=True, oversample=oversample + 0.5)
    run = Run(lambda number: (3, 2), recipe_of(16, None, 8, None), before)
    run.step()
    run.recipe = recipe_of(16, None, wanted, None)
    run.hyperparameters = replace(before, oversample=oversample)
    run.buffer = run.buffer.after_loading(run.version, wanted)
    count = len(run.buffer.entries)
    assert count > wanted
    ages = [run.step()[1]["stale/token_max"] for _ in range(count)]
    assert max(ages) == run.buffer.loaded_bound == 1 + (count - 1) // wanted


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6), wanted=st.integers(1, 4), more=st.integers(0, 7), phase=st.integers(1, 6),
    long_share=st.sampled_from([0.1, 0.5, 0.9]), dynamic=st.booleans(), oversample=st.sampled_from([1.0, 1.5]),
    when_short=st.sampled_from(["train", "stop"]), max_rounds=st.integers(1, 4), ahead=st.integers(0, 1),
    has_end=st.booleans(),
)  # fmt: skip
def test_no_prompt_is_lost_or_older_than_the_bound(
    seed: int, wanted: int, more: int, phase: int, long_share: float, dynamic: bool, oversample: float,
    when_short: Any, max_rounds: int, ahead: int, has_end: bool,
) -> None:  # fmt: skip
    """`staleness` raises beyond the bound, `check` where a ticket is lost or counted twice."""
    draws = np.random.default_rng(seed)
    lengths = np.where(draws.random((1000, 2)) < long_share, 12, draws.integers(1, 13, (1000, 2)))
    is_mixed = draws.random(1000) < 0.6
    hyperparameters = Hyperparameters(
        dynamic_sampling=dynamic,
        oversample=oversample,
        when_short=when_short,
        max_rounds=max_rounds,
    )
    recipe = recipe_of(12, phase, wanted, wanted + more, ahead)
    run = Run(lambda n: lengths[n].tolist(), recipe, hyperparameters, lambda n: bool(is_mixed[n]))
    if has_end:
        run.steps, run.buffer = 12, GroupBuffer()
    trained: list[int] = []
    for _ in range(12):
        try:
            numbers, _ = run.step()
        except UserError:
            assert dynamic
            return
        assert len(numbers) == wanted or (dynamic and when_short == "train")
        trained += numbers
    dropped = [n for n in range(run.buffer.next_number) if run.buffer.dropped >> n & 1]
    waiting = [entry.number for entry in run.buffer.entries]
    assert sorted(trained + dropped + waiting) == list(range(run.buffer.next_number))
    assert dropped == [n for n in dropped if dynamic and not is_mixed[n]]
    most = hyperparameters.num_drawn(wanted + more)
    assert len(waiting) <= max(0, most if ahead and not has_end else most - len(numbers))
    if has_end and not dynamic:
        assert not waiting, "the last step trains on all that wait"


def test_trained_lengths_are_planted_lengths() -> None:
    """No bias to short ones, by Kolmogorov and Smirnov's test and by the numbers of the tickets."""
    draws = np.random.default_rng(1)
    lengths = np.clip(np.exp(draws.normal(3.0, 1.0, (4000, 2))), 1, 96).astype(int)
    in_flight, wanted, steps = 64, 4, 100
    run = Run(lambda n: lengths[n].tolist(), recipe_of(96, 12, wanted, in_flight))
    trained = [n for _ in range(steps) for n in run.step()[0]]
    at, planted = np.arange(97), lengths.ravel()

    def distance(numbers: Sequence[int]) -> float:
        drawn = lengths[list(numbers)].ravel()
        return float(max(abs((drawn[:, None] <= at).mean(0) - (planted[:, None] <= at).mean(0))))

    # of as many independent draws, 1 in 1000 is farther
    bound = 1.95 * (1 / (2 * wanted * steps)) ** 0.5
    assert distance(trained) < bound
    by_length = np.argsort(lengths[: len(trained) + in_flight].max(1), kind="stable")[
        : len(trained)
    ]
    assert distance(by_length.tolist()) > bound, (
        "had the shortest of all that were drawn been trained on"
    )
    missing = np.setdiff1d(np.arange(len(trained)), trained)
    assert len(missing) < in_flight - wanted, "each of the first prompts is trained on, or waits"
