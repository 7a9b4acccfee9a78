"""An engine that differs is named, and none in a healthy run, whatever the distribution of the differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.tracking.engine_band import BOUNDS, FIRST_BAND, EngineBand, Outlier, rank_z
from megarl.types import FloatArray

Run = list[tuple[int, Outlier]]


class Engines:
    """Differences of groups: lognormal, of which some are 10,000 times larger, where a router chose otherwise."""

    def __init__(self, groups: list[int], *, spread: float, flips: float, seed: int) -> None:
        self.groups = groups
        self.spread = spread
        self.flips = flips
        self.rng = np.random.default_rng(seed)

    def step(self, factors: dict[int, float]) -> dict[int, FloatArray]:
        """Of each engine with groups; factors: of engines whose differences are larger."""
        diffs = {}
        for engine, count in enumerate(self.groups):
            normal = self.rng.lognormal(math.log(1e-3), self.spread, count)
            flipped = np.where(self.rng.random(count) < self.flips, 1e4, 1.0)
            if count:
                diffs[engine] = (normal * flipped * factors.get(engine, 1.0)).astype(np.float32)
        return diffs


def outliers(engines: Engines, steps: int, factors: dict[int, float], since: int = 0) -> Run:
    """Step and outlier of each alarm up to the first step that has one."""
    band = EngineBand()
    for step in range(steps):
        band, found = band.after(engines.step(factors if step >= since else {}))
        if found:
            return [(step, outlier) for outlier in found]
    return []


@pytest.mark.parametrize("groups", [[1] * 2, [2] * 2, [4] * 8, [64] * 2, [32] * 8, [3, 40]])
@pytest.mark.parametrize(("spread", "flips"), [(0.1, 0.0), (1.0, 0.01), (3.0, 0.1)])
def test_a_healthy_run_raises_no_alarm(groups: list[int], spread: float, flips: float) -> None:
    for seed in range(2):
        engines = Engines(groups, spread=spread, flips=flips, seed=seed)
        assert outliers(engines, 150, {}) == []


@pytest.mark.parametrize(
    ("groups", "within"), [([64] * 8, 1), ([16] * 4, 3), ([4] * 2, 9), ([2] * 2, 40)]
)
def test_an_engine_with_other_weights_is_named(groups: list[int], within: int) -> None:
    """A hundred times its peers' difference, from step 20 on, or from the first step on."""
    for since in (0, 20):
        engines = Engines(groups, spread=0.7, flips=0.01, seed=since)
        alarms = outliers(engines, since + within, {1: 100.0}, since)
        assert [outlier.engine for _, outlier in alarms] == [1]
        assert alarms[0][0] >= since
        assert alarms[0][1].diff > 20 * alarms[0][1].peers_diff


def test_what_engines_usually_deviate_by_is_in_their_band() -> None:
    """Engines whose medians change by 1.5 times from step to step; then one by 40 times."""
    engines = Engines([64] * 4, spread=0.3, flips=0.0, seed=1)
    rng = np.random.default_rng(2)
    band = EngineBand()
    assert band.band == FIRST_BAND
    for _ in range(100):
        band, found = band.after(
            engines.step({engine: rng.lognormal(0, 0.4) for engine in range(4)})
        )
        assert found == []
    assert BOUNDS[0] < band.band < BOUNDS[1]
    _, found = band.after(engines.step({2: 2 * band.band}))
    assert [outlier.engine for outlier in found] == [2]


def test_a_steady_deviation_within_the_band_is_no_fault() -> None:
    engines = Engines([64] * 4, spread=0.3, flips=0.0, seed=1)
    assert outliers(engines, 300, {3: 2.5}) == []


def test_one_engine_has_no_peers() -> None:
    band = EngineBand()
    assert band.after({0: np.ones(5, np.float32)}) == (band, [])
    assert band.after({}) == (band, [])


def test_equal_differences_are_no_evidence() -> None:
    """In float32 all of them may be 0."""
    band = EngineBand()
    for _ in range(50):
        band, found = band.after({0: np.zeros(20, np.float32), 1: np.zeros(20, np.float32)})
        assert found == []
    assert band.band == BOUNDS[0]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_the_rank_statistic_counts_pairs(own: list[int], others: list[int]) -> None:
    wins = sum((a > b) + (a == b) / 2 for a in own for b in others)
    pairs = len(own) * len(others)
    expected = (wins - pairs / 2) / math.sqrt(pairs * (len(own) + len(others) + 1) / 12)
    assert rank_z(np.array(own, float), np.array(others, float)) == pytest.approx(expected)
