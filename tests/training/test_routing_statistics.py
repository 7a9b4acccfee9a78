"""How evenly experts have tokens, of counts as routers make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algos.statistics import Statistics
from megarl.parallel.pipeline import Norms
from megarl.parallel.routing import load_of
from megarl.training import routing_statistics

NORMS = Norms(denominator=10.0, tokens=10, loss_tokens=10)


def statistics_of(sums: dict[str, Any], num_experts: int = 4) -> Statistics:
    shape: Any = SimpleNamespace(num_experts=num_experts, num_mtp_layers=0)
    return routing_statistics.routing_statistics(sums, NORMS, shape, (1, 3), trains_mtp=False)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of several ranks are those of one (tests/parallel/test_parity.py)."""
    monkeypatch.setattr(routing_statistics.dist, "all_reduce", lambda values: None)


def test_the_busiest_expert_of_each_layer_and_those_without_tokens() -> None:
    sums = {load_of(1): torch.tensor([4, 0, 2, 2]), load_of(3): torch.tensor([1, 1, 1, 5])}
    assert {statistic.name: parts for statistic, parts in statistics_of(sums).items()} == {
        "experts/busiest_layer_1": (2.0,),
        "experts/busiest_layer_3": (2.5,),
        "experts/busiest": (2.5,),
        "experts/unused": (1 / 8,),
    }


def test_an_update_without_tokens_says_nothing_of_experts() -> None:
    assert statistics_of({}) == {}


def test_a_dense_model_has_no_routers() -> None:
    assert statistics_of({}, num_experts=0) == {}
