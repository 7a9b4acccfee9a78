"""Losses and their gradients against slow loops written from the papers, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos.losses import clipped_policy_loss, nll_loss, value_loss


@dataclass
class Row:
    loss_mask_T: torch.Tensor
    loss_weight_T: torch.Tensor
    advantage_T: torch.Tensor
    engine_logp_T: torch.Tensor


def _row(mask: list[bool], weight: list[float], advantage: list[float], engine: list[float]) -> Row:
    return Row(torch.tensor(mask), *(torch.tensor(x, dtype=torch.float64) for x in (weight, advantage, engine)))


def _slow_grpo(logp, old, row, low, high):
    """Loss sum and its gradient, token by token: d loss / d logp = -r A where the unclipped branch is the minimum."""
    total, grads = 0.0, []
    for t in range(len(logp)):
        if not row.loss_mask_T[t]:
            grads.append(0.0)
            continue
        ratio, advantage, weight = math.exp(logp[t] - old[t]), float(row.advantage_T[t]), float(row.loss_weight_T[t])
        plain, clipped = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
        total += -min(plain, clipped) * weight
        grads.append(-ratio * advantage * weight if plain <= clipped else 0.0)
    return total, grads


floats = st.floats(-3, 3)
token = st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01), st.booleans(), floats, st.floats(0.01, 1), floats)


@settings(max_examples=100, deadline=None)
@given(st.lists(token, min_size=1, max_size=12), st.floats(0.05, 0.3), st.floats(0.05, 0.4))
def test_clipped_loss_and_gradient_equal_the_slow_loop(tokens, low, high):
    logp, old, mask, advantage, weight, engine = (list(column) for column in zip(*tokens, strict=True))
    row = _row(mask, weight, advantage, engine)
    logp_T = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    loss, stats = clipped_policy_loss(
        logp_T, torch.tensor(old, dtype=torch.float64), row, clip_low=low, clip_high=high
    )
    loss.backward()
    expected, grads = _slow_grpo(logp, old, row, low, high)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == pytest.approx(grads, abs=1e-12)
    gaps = [abs(o - e) for o, e, m in zip(old, engine, mask, strict=True) if m]
    assert float(stats["gap"]) == pytest.approx(sum(gaps), abs=1e-12)
    assert float(stats["gap_max"]) == pytest.approx(max(gaps, default=0.0), abs=1e-12)
    assert int(stats["tokens"]) == sum(mask)


def test_prompt_tokens_cannot_poison_the_gradient():
    row = _row([False, True], [0.0, 1.0], [0.0, 1.0], [0.0, -1.0])
    logp_T = torch.tensor([500.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_policy_loss(logp_T, torch.tensor([-500.0, -1.0]).double(), row, clip_low=0.2, clip_high=0.2)
    loss.backward()
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0.0, -1.0]


def test_nll_is_the_weighted_sum_over_the_response():
    row = _row([False, True, True], [0.0, 1.0, 0.5], [0.0] * 3, [0.0] * 3)
    logp_T = torch.tensor([-9.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    loss, stats = nll_loss(logp_T, logp_T.detach(), row)
    loss.backward()
    assert float(loss.detach()) == 4.0
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0.0, -1.0, -0.5]
    assert int(stats["tokens"]) == 2


value_token = st.tuples(floats, floats, floats, st.booleans(), st.floats(0.01, 1))


@dataclass
class ValueRow:
    loss_mask_T: torch.Tensor
    loss_weight_T: torch.Tensor
    return_T: torch.Tensor
    old_value_T: torch.Tensor


def _slow_value_loss(value, row, clip):
    """The larger of two squared errors, and its gradient: 0 where the value has gone too far to be followed."""
    total, grads = 0.0, []
    for t in range(len(value)):
        target, old, weight = (float(x[t]) for x in (row.return_T, row.old_value_T, row.loss_weight_T))
        plain = (value[t] - target) ** 2 / 2
        near = value[t] if clip is None else old + min(max(value[t] - old, -clip), clip)
        clipped = (near - target) ** 2 / 2
        if not row.loss_mask_T[t]:
            grads.append(0.0)
            continue
        total += max(plain, clipped) * weight
        grads.append(0.0 if clipped > plain else (value[t] - target) * weight)
    return total, grads


@settings(max_examples=100, deadline=None)
@given(st.lists(value_token, min_size=1, max_size=12), st.data())
def test_value_loss_and_gradient_equal_the_slow_loop(tokens, data):
    value, target, old, mask, weight = (list(column) for column in zip(*tokens, strict=True))
    row = ValueRow(torch.tensor(mask), *(torch.tensor(x, dtype=torch.float64) for x in (weight, target, old)))
    clip = data.draw(st.sampled_from([None, 0.2, 1.0]))
    value_T = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    loss, stats = value_loss(value_T, row, value_clip=clip)
    loss.backward()
    expected, grads = _slow_value_loss(value, row, clip)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert value_T.grad is not None
    on_edge = [clip is not None and abs(abs(v - o) - clip) < 1e-9 for v, o in zip(value, old, strict=True)]
    same = [abs((v - r) ** 2 - (o - r) ** 2) < 1e-12 for v, r, o in zip(value, target, old, strict=True)]
    for mine, other, is_tie in zip(value_T.grad.tolist(), grads, map(max, on_edge, same), strict=True):
        assert is_tie or mine == pytest.approx(other, abs=1e-12)
    assert int(stats["tokens"]) == sum(mask)
    errors = [r - o for r, o, m in zip(target, old, mask, strict=True) if m]
    assert float(stats["error"]) == pytest.approx(sum(errors), abs=1e-12)
    assert float(stats["error_square"]) == pytest.approx(sum(e * e for e in errors), abs=1e-12)
