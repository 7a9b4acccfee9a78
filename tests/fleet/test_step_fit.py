"""The fit of an engine's steps finds planted seconds, and never negative ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.fleet.step_fit import EngineHistory, EngineWork, fitted, seconds_of
from megarl.types import StepSeconds

PLANTED = StepSeconds(0.03, 2e-4, 5e-6)
FEW = st.integers(1, 10**5)
WORK = st.builds(EngineWork, steps=FEW, new_tokens=FEW, read_tokens=FEW)


def round_of(seed: int) -> EngineWork:
    generator, work = np.random.default_rng(seed), EngineWork()
    for length in generator.lognormal(5, 1, generator.integers(1, 200)).astype(int).tolist():
        work = work.with_sample(int(generator.integers(10, 5000)), length)
    return work


def test_samples_add_up_and_the_longest_decides_the_steps() -> None:
    work = EngineWork().with_sample(7, 30).with_sample(20, 10)
    assert work == EngineWork(steps=30, new_tokens=40, read_tokens=27)
    assert seconds_of(StepSeconds(1.0, 0.1, 0.01), work) == pytest.approx(30 + 4 + 0.27)


def test_planted_seconds_are_found() -> None:
    fit = fitted([(work, seconds_of(PLANTED, work)) for work in map(round_of, range(12))])
    assert (fit.step_s, fit.sequence_s, fit.read_s) == pytest.approx((0.03, 2e-4, 5e-6), rel=1e-6)


def test_a_round_is_foretold_from_those_before_despite_noise() -> None:
    history, generator = EngineHistory(), np.random.default_rng(0)
    for seed in range(3):
        history.add(round_of(seed), 1.0)
    assert history.fitted() is None, "too few"
    history = EngineHistory()
    history.add(EngineWork(), 3.0)  # had nothing to do
    for work in map(round_of, range(30)):
        history.add(work, seconds_of(PLANTED, work) * generator.normal(1, 0.05))
    fit = history.fitted()
    assert fit
    for work in map(round_of, range(100, 120)):
        assert seconds_of(fit, work) == pytest.approx(seconds_of(PLANTED, work), rel=0.1)


@given(st.lists(st.tuples(WORK, st.floats(1e-3, 1e3)), min_size=1, max_size=8))
def test_no_figure_is_negative_and_no_single_one_fits_better(
    seen: list[tuple[EngineWork, float]],
) -> None:
    def error(fit: StepSeconds) -> float:
        return sum((seconds_of(fit, work) / seconds - 1) ** 2 for work, seconds in seen)

    best = fitted(seen)
    assert min(best.step_s, best.sequence_s, best.read_s) >= 0
    work, seconds = seen[0]
    token_s = seconds / work.new_tokens
    for scale in (0.5, 1.0):
        assert error(best) <= error(StepSeconds(0.0, scale * token_s, 0.0)) + 1e-6
