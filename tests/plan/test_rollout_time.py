"""Seconds of sampling: continuous batching against a simulation token by token."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.parallel.engine_layout import EngineLayout
from megarl.plan.batch import Samples
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.rollout_time import decode_s, rollout_time
from megarl.types import ModelShape
from tests.plan import recipes as planning

CARD = load_hardware(planning.H800)
SHAPE = ModelShape(10, 1024, 16, 4, 64, 32000, num_experts=64, experts_per_token=8, moe_ffn_size=512)
EXPERTS_BYTES = 10 * 64 * 3 * 1024 * 512 * 2


def speed_of(layout: EngineLayout, kv_bytes: float = 0.0, shape: ModelShape = SHAPE) -> EngineSpeed:
    return EngineSpeed(shape, layout, CARD, 8, "bfloat16", EXPERTS_BYTES / layout.tp + 1e8, kv_bytes)


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


def test_no_room_makes_a_rollout_shorter_than_its_longest_response_alone() -> None:
    """Its steps are of one sequence each, of 50 tokens and as many more as there were steps."""
    samples = Samples(10, 10, 40, 40, 50, 450, np.arange(1, 41) * 10)
    speed = speed_of(EngineLayout(4, 1, 1))
    found = rollout_time(speed, samples, 100)
    assert found.longest == 340  # every third of the responses is on the fullest engine
    by_step = sum(speed.step_s(1, 50 + age) for age in range(found.longest))
    assert found.alone_s == pytest.approx(by_step, rel=1e-3)
    assert found.alone_s < found.decode_s < rollout_time(speed, samples, 2).decode_s
    assert rollout_time(speed, samples, 2).alone_s == found.alone_s
