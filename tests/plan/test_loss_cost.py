"""What a death costs: half of what was under way, and the bytes that bring it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.hardware import load_hardware
from megarl.plan.loss_cost import LossCost, loss_cost
from megarl.plan.muon_cost import MuonWork
from megarl.plan.step_time import StepTime
from tests.plan import recipes as planning

CARD = load_hardware(planning.H800)
STEP = StepTime(rollout_s=100, score_s=2, critic_s=8, train_s=30, ahead_s=0, reshard_s=1, save_s=9)


MODEL: Any = SimpleNamespace(
    trains=True,
    parameters=10**9,
    weight_bytes=2,
    layout=SimpleNamespace(pp=2),
    trained=lambda stage: (stage + 1) * 10**8,
    optimizer_share=lambda stage: (stage + 1) * 10**7,
    muon=lambda _: MuonWork(),
)
# of the fuller stage
STATE_BYTES = 2 * 2e8 + 12 * 2e7


@pytest.fixture
def cost(tmp_path: Path) -> Callable[..., Any]:
    def of(*keys: str) -> LossCost:
        recipe = planning.small(tmp_path, *keys)
        return loss_cost(recipe, CARD, [MODEL], STEP, 1e9)

    return of


def test_an_engine_costs_half_of_its_share_and_its_weights(cost: Callable[..., Any]) -> None:
    two = cost("rollout.engine.count=2").engine_s
    assert two == pytest.approx((50 + 1e9 / CARD.nic_reached_per_s) / 2)
    assert cost("rollout.engine.count=1").engine_s == pytest.approx(50 + STEP.reshard_s)


def test_a_rank_costs_half_of_a_training_and_its_state(cost: Callable[..., Any]) -> None:
    copied = cost("checkpoint.memory_copies=true", "checkpoint.every=10")
    assert copied.source == "copies"
    assert copied.rank_s == pytest.approx(20 + STATE_BYTES / CARD.pcie_bytes_per_s)
    assert copied.node_s == pytest.approx(20 + STATE_BYTES / CARD.nic_reached_per_s)


def test_without_copies_it_costs_what_was_trained_since_the_checkpoint(
    cost: Callable[..., Any],
) -> None:
    each = cost("checkpoint.every=1")
    tenth = cost("checkpoint.every=10")
    assert each.rank_s - 20 == pytest.approx(each.restart_s - STEP.reshard_s - 75)
    assert tenth.rank_s == tenth.node_s == tenth.restart_s
    assert tenth.restart_s - each.restart_s == pytest.approx(4.5 * STEP.total_s)
    never = cost("checkpoint.every=null")
    assert (never.rank_s, never.node_s, never.restart_s) == (None, None, None)
