"""Seconds of sampling: of the fullest engine, by its room; its events are in test_engine_simulation.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.model.shape import IndexerShape, ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.plan.batch import Samples, response_lengths
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.engine_memory import token_bytes
from megarl.plan.engine_simulation import GroupLimits
from megarl.plan.rollout_time import SimulatedSpeed, rollout_time, rough_rollout_s
from tests.plan.plans import H800, V3, speed_of


def limits(groups: int, slots: int, cache: int = 10**9, longest: int = 400) -> GroupLimits:
    return GroupLimits(groups, slots, cache, longest)


# the longest in the order of their prompts
SAMPLES = Samples(10, 10, 40, 40, 50, 450, np.arange(1, 41) * 10)


def test_less_room_takes_longer_and_the_fullest_engine_counts() -> None:
    speed = speed_of(EngineLayout(4, 1, 1))
    wide, narrow = (
        rollout_time(speed, SAMPLES, limits(1, 100)),
        rollout_time(speed, SAMPLES, limits(1, 3)),
    )
    assert (wide.running, narrow.running) == (12, 3)  # 3 of 10 prompts, with 4 samples each
    assert narrow.total_s > wide.total_s > wide.tail_s > 0
    assert wide.tokens_per_s == pytest.approx(SAMPLES.responses.sum() / wide.total_s)
    assert wide.prefill_s == pytest.approx(3 * sum(speed.prefill_s(50)))
    assert wide.retracted == wide.again_share == 0


def test_no_room_makes_a_rollout_shorter_than_its_longest_response_alone() -> None:
    """Its steps are of one sequence each, of 50 tokens and as many more as there were steps."""
    speed = speed_of(EngineLayout(4, 1, 1), kv_bytes=1e5)
    rollout = rollout_time(speed, SAMPLES, limits(1, 100))
    assert rollout.longest == 340  # every third of the responses is on the fullest engine
    by_step = sum(speed.step_s(1, 50 + age) for age in range(rollout.longest))
    assert rollout.alone_s == pytest.approx(by_step, rel=1e-3)
    assert rollout.alone_s < rollout.decode_s < rollout_time(speed, SAMPLES, limits(1, 2)).decode_s
    assert rollout_time(speed, SAMPLES, limits(1, 2)).alone_s == rollout.alone_s


def test_equal_lengths_take_turns_of_as_many_steps() -> None:
    """12 responses of 200 tokens, 4 at once: three turns, in each of which the cache grows from 50 to 250 tokens."""
    equal = replace(SAMPLES, responses=np.full(40, 200))
    speed = speed_of(EngineLayout(4, 1, 1), kv_bytes=1e5)
    rollout = rollout_time(speed, equal, limits(1, 4))
    assert rollout.decode_s == pytest.approx(3 * 200 * speed.step_s(4, 150))
    assert rollout.tail_s == 0


def test_a_small_cache_loses_sequences_and_reads_them_again() -> None:
    speed = speed_of(EngineLayout(1, 4, 4, dp=2))
    long = replace(SAMPLES, responses=20 * SAMPLES.responses)
    wide, narrow = (
        rollout_time(speed, long, limits(2, 20, cache, 8000)) for cache in (10**6, 20_000)
    )
    assert wide.retracted == 0 < narrow.retracted
    assert 0 < narrow.again_share < 1
    assert narrow.prefill_s > wide.prefill_s and narrow.total_s > wide.total_s


def test_without_a_cache_each_group_runs_one_at_a_time() -> None:
    """A recipe that does not fit has a plan, too."""
    rollout = rollout_time(speed_of(EngineLayout(1, 4, 4, dp=2)), SAMPLES, limits(2, 20, 1))
    assert (rollout.running, rollout.retracted) == (2, 0)


@pytest.mark.parametrize("cache", [20_000, 40_000, 10**6])
def test_the_formula_is_near_the_simulation(cache: int) -> None:
    """It orders the search's layouts, and its room is what the cache holds of sequences of all ages."""
    responses = response_lengths(256, 8000, 0.4)
    samples = Samples(32, 32, 256, 256, 50, 8050, responses)
    speed = speed_of(EngineLayout(1, 4, 4), kv_bytes=1e4)
    rough = rough_rollout_s(speed, samples, cache // samples.running_tokens)
    assert rough == pytest.approx(
        rollout_time(speed, samples, limits(1, 256, cache, 8000)).total_s, rel=0.25
    )


SPARSE = replace(V3, indexer=IndexerShape(64, 128, 2048, interleaved_rope=False))


def test_a_long_context_costs_less_where_an_indexer_chooses_the_keys() -> None:
    layout = EngineLayout(1, 32, 32, 32, whole_dense=True, group_head=True)
    (dense, sparse) = (
        EngineSpeed(shape, layout, H800, 8, "bfloat16", 40e9, token_bytes(shape, layout, 2))
        for shape in (V3, SPARSE)
    )
    (near, far) = (sparse.step(512, context).attention for context in (2048, 65536))
    assert 1.0 < near / dense.step(512, 2048).attention < 1.2
    assert far < 0.2 * dense.step(512, 65536).attention


@pytest.mark.parametrize("shape", [V3, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("draft", [0, 1])
def test_the_simulation_has_the_seconds_of_the_step_and_waits_for_the_fullest_group(
    shape: ModelShape,
    draft: int,
) -> None:
    layout = EngineLayout(1, 32, 32, 32, whole_dense=True, group_head=True, draft=draft)
    speed = EngineSpeed(shape, layout, H800, 8, "bfloat16", 40e9, token_bytes(shape, layout, 2))
    simulated, running = SimulatedSpeed(speed), np.full(32, 12.0)
    for context in (100, 8000):
        even = running * context
        # of a line through a longer context, where reads may take longer than products
        exact = pytest.approx(speed.step_s(32 * 12, context), rel=1e-4 if shape.indexer else 1e-6)
        assert simulated.step_s(running, even) == exact
        uneven = even + np.eye(1, 32)[0] * 1000
        exact.expected = speed.step_s(32 * 12, context + 1000 / 12)
        assert simulated.step_s(running, uneven) == exact
