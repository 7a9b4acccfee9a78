"""Steps in phases on planted lengths: by hand, as the controller takes them, and what holds of every run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.plan.phase_simulation import OpenGroup, PhaseSizes, phased_steps
from megarl.samples.buffer import staleness_bound
from megarl.types import Hyperparameters, IntArray
from tests.samples.test_buffer import Run as RealRun
from tests.samples.test_buffer import recipe_of

LONGEST, SAMPLES, STEPS = 24, 2, 8

planted = {
    "seed": st.integers(0, 10**6),
    "wanted": st.integers(1, 4),
    "more": st.integers(0, 9),
    "phase": st.integers(1, LONGEST),
    "long_share": st.sampled_from([0.0, 0.1, 0.9]),
}
ahead_or_not = st.integers(0, 1)


class Run:
    """phases: of each ticket its (tokens before, tokens new) in each phase."""

    def __init__(self, sizes: PhaseSizes, lengths: IntArray, steps: int | None = None) -> None:
        self.lengths = lengths
        self.phases: dict[int, list[tuple[int, IntArray]]] = defaultdict(list)
        self.steps = list(
            islice(phased_steps(sizes, self.lengths_of, self.run_phase, steps=steps), STEPS)
        )

    def lengths_of(self, prompt_index: int) -> IntArray:
        return self.lengths[prompt_index]

    def run_phase(self, groups: Sequence[OpenGroup], beside_training: bool) -> list[int]:
        assert [group.done for group in groups] == sorted(
            (group.done for group in groups), reverse=True
        )
        for group in groups:
            self.phases[group.prompt_index].append((group.done, group.new))
        return [group.prompt_index for group in groups]

    @property
    def trained(self) -> list[int]:
        return [prompt_index for step in self.steps for prompt_index in step.trained]


def drawn_lengths(seed: int, long_share: float) -> IntArray:
    draws = np.random.default_rng(seed)
    shape = 200, SAMPLES
    return np.where(
        draws.random(shape) < long_share, LONGEST, draws.integers(1, LONGEST + 1, shape)
    )


def test_a_straggler_by_hand() -> None:
    """Ticket 1 takes four phases, of a step each; ticket 7 is complete a step before it is trained on."""
    lengths = np.full((20, SAMPLES), (3, 4))
    lengths[1] = 16, 2
    run = Run(PhaseSizes(2, 4, SAMPLES, 4), lengths)
    assert [step.trained for step in run.steps[:4]] == [(0, 2), (3, 4), (5, 6), (1, 7)]
    assert [step.results for step in run.steps[:4]] == [
        ([0, 1, 2, 3],),
        ([1, 4, 5],),
        ([1, 6, 7],),
        ([1, 8, 9],),
    ]
    assert [(done, new.tolist()) for done, new in run.phases[1]] == [
        (0, [4, 2]),
        (4, [4]),
        (8, [4]),
        (12, [4]),
    ]
    assert [step.tokens_by_age.tolist() for step in run.steps[:4]] == [
        [14],
        [7, 7],
        [7, 7],
        [4, 4 + 7, 4, 4 + 2],
    ]
    assert run.steps[3].oldest == 3


@settings(max_examples=60, deadline=None)
@given(ahead=ahead_or_not, steps=st.sampled_from([None, STEPS, 2 * STEPS]), **planted)
def test_steps_are_those_that_the_controller_takes(
    seed: int, wanted: int, more: int, phase: int, long_share: float, ahead: int, steps: int | None
) -> None:
    lengths, sizes = (
        drawn_lengths(seed, long_share),
        PhaseSizes(wanted, wanted + more, SAMPLES, phase, ahead),
    )
    recipe = recipe_of(LONGEST, phase, wanted, wanted + more, ahead)
    real = RealRun(lambda prompt_index: lengths[prompt_index].tolist(), recipe, steps=steps)
    for version, step in enumerate(Run(sizes, lengths, steps).steps):
        phases, (prompt_indices, metrics) = real.phases, real.step()
        assert (list(step.trained), len(step.all_results)) == (prompt_indices, real.phases - phases)
        parts = [
            part
            for prompt_index in prompt_indices
            for parts in real.parts[prompt_index]
            for part in parts
        ]
        ages = [version - part.version for part in parts]
        assert (
            step.tokens_by_age.tolist()
            == np.bincount(ages, [part.num_tokens for part in parts]).tolist()
        )
        assert metrics.get("stale/token_max", 0) == step.oldest


@settings(max_examples=40, deadline=None)
@given(ahead=ahead_or_not, **planted)
def test_tokens_are_never_older_than_the_bound_and_every_sample_is_finished(
    seed: int, wanted: int, more: int, phase: int, long_share: float, ahead: int
) -> None:
    lengths = drawn_lengths(seed, long_share)
    run = Run(PhaseSizes(wanted, wanted + more, SAMPLES, phase, ahead), lengths)
    recipe = recipe_of(LONGEST, phase, wanted, wanted + more, ahead)
    assert max(step.oldest for step in run.steps) <= staleness_bound(recipe, Hyperparameters())
    assert len(run.trained) == len(set(run.trained)) == STEPS * wanted
    for step in run.steps:
        assert step.tokens_by_age.sum() == lengths[list(step.trained)].sum()
        for prompt_index in step.trained:
            assert (
                sum(new.sum() for _, new in run.phases[prompt_index]) == lengths[prompt_index].sum()
            )
            assert all(new.max() <= phase for _, new in run.phases[prompt_index])
