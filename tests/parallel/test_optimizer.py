"""Where an optimizer's state lies when its rank's memory is lent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megarl.parallel.optimizer import move_optimizer


def test_state_moves_and_the_count_of_steps_stays() -> None:
    """On a GPU, AdamW would wait for the device once for each weight to read its count."""
    layer = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(layer.parameters())
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    inner.step()
    optimizer: Any = SimpleNamespace(
        param_groups=inner.param_groups,
        chained_optimizers=[SimpleNamespace(optimizer=inner, is_stub_optimizer=False)],
    )
    move_optimizer(optimizer, [layer], "meta")
    assert not any(param.is_meta for param in layer.parameters()), "they are the model's own"
    assert len(inner.state) == 2
    for state in inner.state.values():
        assert state["exp_avg"].is_meta and state["exp_avg_sq"].is_meta
        assert state["step"].is_cpu and float(state["step"]) == 1.0
