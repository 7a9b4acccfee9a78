"""Seconds of sampling: the roofline by hand, and continuous batching against a simulation token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.parallel.engine_layout import EngineLayout
from megarl.plan.batch import Samples
from megarl.plan.rollout_time import EngineSpeed, decode_s, rollout_time
from megarl.types import ModelShape
from tests.plan import recipes as planning

CARD = load_hardware(planning.H800)
SHAPE = ModelShape(10, 1024, 16, 4, 64, 32000, num_experts=64, experts_per_token=8, moe_ffn_size=512)
EXPERTS_BYTES = 10 * 64 * 3 * 1024 * 512 * 2


def speed_of(layout: EngineLayout, kv_bytes: float = 0.0, shape: ModelShape = SHAPE) -> EngineSpeed:
    return EngineSpeed(shape, layout, CARD, 8, "bfloat16", EXPERTS_BYTES / layout.tp + 1e8, kv_bytes)


def test_one_sequence_reads_its_experts_alone() -> None:
    speed = speed_of(EngineLayout(1, 1, 1))
    assert speed.expert_bytes == EXPERTS_BYTES and speed.other_bytes == 1e8
    reached = CARD.hbm_bytes_per_s * CARD.hbm_share
    assert speed.step_s(1, 100) == pytest.approx((EXPERTS_BYTES * 8 / 64 + 1e8) / reached)
    assert speed.step_s(64, 100) == pytest.approx((EXPERTS_BYTES * (1 - (7 / 8) ** 64) + 1e8) / reached)


def test_the_cache_is_read_by_the_length_of_what_runs() -> None:
    reached = CARD.hbm_bytes_per_s * CARD.hbm_share
    without, with_cache = speed_of(EngineLayout(1, 1, 1)), speed_of(EngineLayout(1, 1, 1), 1000.0)
    assert with_cache.step_s(4, 500) - without.step_s(4, 500) == pytest.approx(4 * 500 * 1000 / reached)
    shared = replace(with_cache, layout=EngineLayout(1, 4, 4, dp=4))  # a quarter of the sequences in each group
    bare = replace(without, layout=EngineLayout(1, 4, 4, dp=4))
    assert shared.step_s(4, 500) - bare.step_s(4, 500) == pytest.approx(500 * 1000 / reached)


def test_many_sequences_are_bound_by_products() -> None:
    speed = speed_of(EngineLayout(1, 1, 1))
    assert speed.step_s(8000, 10) == pytest.approx(2 * speed.step_s(4000, 10))


def test_an_engine_over_nodes_waits_for_the_network() -> None:
    inside, over = (speed_of(EngineLayout(1, tp, 1)).step_s(1, 10) for tp in (8, 16))
    assert inside > 20 * CARD.nvlink_latency_s and over > 20 * CARD.nic_latency_s


def by_the_token(lengths: list[int], slots: int) -> float:
    """Seconds where a step of n sequences of mean age a takes n + a / 100."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([0, waiting.pop(0)])
        ages = [age + 0.5 for age, _ in running]
        seconds += len(running) + sum(ages) / len(ages) / 100
        running = [[age + 1, length] for age, length in running if age + 1 < length]
    return seconds


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_continuous_batching_as_token_by_token(slots: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 20).tolist()
    seconds, tail = decode_s(lengths, slots, lambda running, age: running + age / 100)
    assert seconds == pytest.approx(by_the_token(lengths, slots))
    assert 0 <= tail < seconds


def test_equal_lengths_take_turns_and_leave_no_tail() -> None:
    assert decode_s([10] * 6, 3, lambda running, age: 1.0) == (20.0, 0.0)
    assert decode_s([1, 1, 1, 9], 4, lambda running, age: 1.0) == (9.0, 8.0)


def test_less_room_takes_longer_and_the_fullest_engine_counts() -> None:
    samples = Samples(10, 10, 40, 40, 50, 400, np.arange(1, 41) * 10)
    speed = speed_of(EngineLayout(4, 1, 1))
    wide, narrow = rollout_time(speed, samples, 100), rollout_time(speed, samples, 3)
    assert (wide.running, narrow.running) == (12, 3)  # 3 of 10 prompts, with 4 samples each
    assert narrow.total_s > wide.total_s > wide.tail_s > 0
    assert wide.tokens_per_s == pytest.approx(samples.responses.sum() / wide.total_s)
    assert wide.prefill_s == pytest.approx(speed.prefill_s(3, 50))
