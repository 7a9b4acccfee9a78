"""Losses stay finite with any log-probabilities, and ordinary ones give what float64 loops give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import ALGORITHMS
from megarl.algos.losses import kl_T, policy_loss, policy_statistics, turn_diffs
from megarl.algos.rollout_correction import ROLLOUT_CORRECTION_BOUNDS
from megarl.algos.targets import Targets
from megarl.tracking.metrics import train_metrics
from megarl.types import Hyperparameters
from tests.algos.dropping import kept

SURROGATES = {row.surrogate.__name__: row.surrogate for row in ALGORITHMS.values() if row.surrogate}
EXTREME = st.sampled_from([0.0, -1e-6, -0.5, -3.0, -21.0, -88.0, -89.5, -120.0, -1e4, -3e38])
OF_ENGINE = st.one_of(EXTREME, st.just(-math.inf))


def row_of(
    tokens: list[Any], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, Targets]:
    """(logp_T, old_logp_T, targets) of (logp, old, engine, reference, advantage, is_stale) tokens of two sequences."""
    columns = zip(*tokens, strict=True)
    logp_T, old_T, engine_T, reference_T, advantage_T, stale_T = (
        torch.tensor(column, dtype=dtype) for column in columns
    )
    ones_T, sequence_T = torch.ones_like(logp_T), torch.arange(len(tokens)) % 2
    targets = Targets(
        loss_mask_T=ones_T > 0, loss_weight_T=ones_T / 4, advantage_T=advantage_T, outcome_T=ones_T,
        engine_logp_T=engine_T, nll_weight_T=ones_T / 8, is_stale_T=stale_T > 0,
        sequence_T=sequence_T.sort().values, reference_logp_T=reference_T,
    )  # fmt: skip
    return logp_T.requires_grad_(), old_T, targets


tokens_of = st.tuples(
    EXTREME, EXTREME, OF_ENGINE, EXTREME, st.sampled_from([-2.0, 0.0, 1.0]), st.booleans()
)


@pytest.mark.parametrize("rollout_correction", ["off", *ROLLOUT_CORRECTION_BOUNDS])
@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=25)
@given(tokens=st.lists(tokens_of, min_size=1, max_size=6), dual_clip=st.sampled_from([None, 3.0]))
def test_any_log_probability_gives_a_finite_loss(
    name: str, rollout_correction: Any, tokens: list[Any], dual_clip: Any
) -> None:
    """In float32: of the loss, of its gradient, and of every statistic; an engine may report -inf."""
    hparams = Hyperparameters(
        rollout_correction=rollout_correction,
        kl_coefficient=0.1,
        dual_clip=dual_clip,
        positive_nll=0.1,
    )
    logp_T, old_T, targets = row_of([(max(token[0], -1e4), *token[1:]) for token in tokens])
    targets = kept(old_T, targets, hparams)
    loss, stats = policy_loss(
        SURROGATES[name], logp_T, torch.ones_like(old_T), old_T, targets, hparams
    )
    loss.backward()
    stats |= policy_statistics(logp_T, torch.ones_like(old_T), targets) | turn_diffs(old_T, targets)
    assert loss.isfinite() and logp_T.grad is not None and logp_T.grad.isfinite().all()
    assert all(parts.double().isfinite().all() for parts in stats.values())
    metrics = train_metrics(
        [{statistic: tuple(parts.reshape(-1).tolist()) for statistic, parts in stats.items()}]
    )
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "log_ratio", [-400.0, -89.0, -20.5, -19.5, -1.0, 0.0, 0.15625, 1.0, 19.5, 20.5, 89.0, 400.0]
)
def test_gradients_of_extreme_ratios_equal_a_float64_loop(
    log_ratio: float, advantage: float
) -> None:
    """-A r where the minimum of PPO is the unclipped side, else 0; and 0 beyond a log-ratio of 20, as in verl."""
    logp_T, old_T, targets = row_of(
        [(-500.0, -500.0 - log_ratio, -500.0, -500.0, advantage, False)]
    )
    loss, _ = policy_loss(SURROGATES["clipped"], logp_T, logp_T, old_T, targets, Hyperparameters())
    loss.backward()
    ratio = math.exp(log_ratio) if abs(log_ratio) <= 20.0 else None
    is_clipped = log_ratio > math.log(1.2) if advantage > 0 else log_ratio < math.log(0.8)
    expected = 0.0 if ratio is None or is_clipped else -advantage * ratio / 4
    assert logp_T.grad is not None and logp_T.grad.tolist() == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize(
    "difference", [-400.0, -9.0, -1.0, -1e-3, -1e-5, 0.0, 1e-6, 1e-4, 0.5, 2.0, 2.7, 15.0, 400.0]
)
def test_the_k3_estimate_and_its_gradient_equal_a_float64_loop(difference: float) -> None:
    """At most 10, and without a gradient there; near 0 to the last digits, which exp(d) - 1 has not."""
    logp_T = torch.zeros(1, requires_grad=True)
    reference_T = torch.tensor([difference])
    estimate_T = kl_T(logp_T, reference_T, "k3")
    estimate_T.sum().backward()
    exact = float(reference_T[0])
    is_bounded = abs(exact) > 20 or math.expm1(exact) - exact > 10
    value = 10.0 if is_bounded else math.expm1(exact) - exact
    # by log p, from which the difference is taken
    slope = 0.0 if is_bounded else -math.expm1(exact)
    assert float(estimate_T.detach()) == pytest.approx(value, rel=1e-6, abs=1e-7 * abs(exact))
    assert logp_T.grad is not None and float(logp_T.grad) == pytest.approx(
        slope, rel=1e-6, abs=1e-7
    )
