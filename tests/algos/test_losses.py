"""Losses and their gradients against slow loops written from the papers, in float64."""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos.losses import (
    DIFF,
    DIFF_MAX,
    ENGINE_KL,
    EXPLAINED_VARIANCE,
    FAR,
    RIGHT,
    nll_loss,
    outcome_loss,
    policy_loss,
    value_loss,
)
from megarl.algos.rollout_correction import MASKED, ROLLOUT_CORRECTION_BOUNDS
from megarl.algos.statistics import TOKENS
from megarl.algos.surrogates import cispo, clipped, reinforce, sequence_clipped
from megarl.algos.targets import Targets
from megarl.types import Hyperparameters
from tests.algos.dropping import kept

SURROGATES = {
    "clipped": clipped,
    "sequence": sequence_clipped,
    "cispo": cispo,
    "reinforce": reinforce,
}
floats = st.floats(-3, 3)


def row_with(
    loss_mask_T: torch.Tensor, loss_weight_T: torch.Tensor, **read: torch.Tensor | None
) -> Targets:
    """Targets that are NaN, or no sequence's, where a test does not set them: its loss must not read those."""
    unread_T = torch.full_like(loss_weight_T, torch.nan)
    names = ("advantage_T", "outcome_T", "engine_logp_T", "nll_weight_T", "is_stale_T")
    fields: dict[str, Any] = {
        **dict.fromkeys(names, unread_T),
        "sequence_T": torch.full(unread_T.shape, -1),
        **read,
    }
    return Targets(loss_mask_T=loss_mask_T, loss_weight_T=loss_weight_T, **fields)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def slow_surrogate(
    name: str, hparams: Hyperparameters, logp: Any, old: float, log_s: Any, advantage: float
) -> Any:
    """One token's loss, as the papers have it; log_s: the mean log-ratio of its sequence."""
    log_ratio = log_s if name == "sequence" else logp - old
    low, high = 1 - hparams.clip_low, 1 + hparams.clip_high
    if name == "reinforce":
        return -advantage * logp
    if name == "cispo":
        return -clip(float(log_ratio.detach().exp()), low, high) * advantage * logp
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if (
        hparams.dual_clip
        and advantage < 0
        and float(objective.detach()) < hparams.dual_clip * advantage
    ):
        objective = torch.zeros_like(ratio) + hparams.dual_clip * advantage
    return -objective


def slow_weight(hparams: Hyperparameters, w: float, product: float, mean: float) -> float | None:
    """Of pi_old / mu: of the token, of its sequence's product and geometric mean; None: the token is dropped."""
    if hparams.rollout_correction == "off":
        return 1.0
    low, high = ROLLOUT_CORRECTION_BOUNDS[hparams.rollout_correction]
    low = low if hparams.rollout_correction_low is None else hparams.rollout_correction_low
    high = high if hparams.rollout_correction_high is None else hparams.rollout_correction_high
    if hparams.rollout_correction == "tis":
        return min(w, high)
    decides = {"mis_sequence": product, "mis_geometric": mean}.get(hparams.rollout_correction, w)
    if not low <= decides <= high:
        return None
    return product if hparams.rollout_correction == "mis_sequence" else w


def slow_kl(hparams: Hyperparameters, logp: Any, reference: float) -> Any:
    ratio = (reference - logp).exp()
    k3 = (ratio - 1 - ratio.log()).clamp(max=10.0)
    return {"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": k3}[hparams.kl_estimator]


def slow_loss(
    name: str,
    hparams: Hyperparameters,
    logp_T: torch.Tensor,
    entropy_T: torch.Tensor,
    old: list[float],
    row: Targets,
) -> Any:
    """The whole row, sequence by sequence and token by token; some tokens of a sequence are of earlier policies.

    A token that the mismatch drops has no term at all, and no part in the ratio of its sequence.
    """
    if hparams.rollout_correction == "off":  # then the engine is the old policy of those, or of all
        is_engine = hparams.old_logprobs == "engine"
        old = [
            float(row.engine_logp_T[t]) if is_engine or row.is_stale_T[t] else old_logp
            for t, old_logp in enumerate(old)
        ]
    total = torch.zeros((), dtype=torch.float64)
    numbers = range(len(logp_T))
    for _, tokens in groupby(numbers, key=lambda t: int(row.sequence_T[t])):
        places = [t for t in tokens if row.loss_mask_T[t]]
        if not places:
            continue
        log_w = [old[t] - float(row.engine_logp_T[t]) for t in places]
        product, mean = math.exp(sum(log_w)), math.exp(sum(log_w) / len(log_w))
        weights = {
            t: slow_weight(hparams, math.exp(w), product, mean)
            for t, w in zip(places, log_w, strict=True)
        }
        kept_weights = {t: weight for t, weight in weights.items() if weight is not None}
        log_s = sum(logp_T[t] - old[t] for t in kept_weights) / max(1, len(kept_weights))
        for t, weight in kept_weights.items():
            token_loss = slow_surrogate(
                name, hparams, logp_T[t], old[t], log_s, float(row.advantage_T[t])
            )
            token_loss = token_loss * weight
            assert row.reference_logp_T is not None
            token_loss = token_loss + hparams.kl_coefficient * slow_kl(
                hparams, logp_T[t], float(row.reference_logp_T[t])
            )
            token_loss = token_loss - hparams.entropy_coefficient * entropy_T[t]
            total = total + token_loss * row.loss_weight_T[t]
            total = total - (logp_T[t] * row.nll_weight_T[t] if hparams.positive_nll else 0.0)
    return total


token = st.tuples(
    st.floats(-4, -0.01), st.floats(-4, -0.01), st.booleans(), floats, st.floats(0.01, 1), st.floats(-4, -0.01),
    st.floats(-4, -0.01), st.floats(0, 2), st.booleans(),
)  # fmt: skip
some_rules = st.builds(
    Hyperparameters,
    clip_low=st.floats(0.05, 0.3),
    clip_high=st.floats(0.05, 0.4),
    dual_clip=st.sampled_from([None, 3.0]),
    kl_coefficient=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coefficient=st.sampled_from([0.0, 0.01]),
    old_logprobs=st.sampled_from(["train", "engine"]),
    rollout_correction=st.sampled_from(["off", *ROLLOUT_CORRECTION_BOUNDS]),
    rollout_correction_low=st.sampled_from([None, 0.3]),
    rollout_correction_high=st.sampled_from([None, 1.7]),
    positive_nll=st.sampled_from([0.0, 0.1]),
).filter(lambda hparams: hparams.old_logprobs == "train" or hparams.rollout_correction == "off")


@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=60)
@given(
    sequences=st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4),
    hparams=some_rules,
)
def test_loss_and_gradient_equal_the_slow_loop(
    name: str, sequences: list[list[Any]], hparams: Hyperparameters
) -> None:
    columns = zip(*(values for sequence in sequences for values in sequence), strict=True)
    logp, old, mask, advantage, weight, engine, reference, entropy, stale = map(list, columns)
    numbers = [number for number, sequence in enumerate(sequences) for _ in sequence]
    exact = partial(torch.tensor, dtype=torch.float64)
    row = row_with(
        torch.tensor(mask), exact(weight), advantage_T=exact(advantage), engine_logp_T=exact(engine),
        reference_logp_T=exact(reference), sequence_T=torch.tensor(numbers),
        nll_weight_T=exact(weight) * torch.tensor(mask) * (torch.tensor(numbers) % 2),
        is_stale_T=torch.tensor(stale),
    )  # fmt: skip
    results, of_kept = [], kept(exact(old), row, hparams)
    for loss in (
        lambda p_T, h_T: policy_loss(SURROGATES[name], p_T, h_T, exact(old), of_kept, hparams),
        lambda p_T, h_T: (slow_loss(name, hparams, p_T, h_T, old, row), {}),
    ):
        logp_T, entropy_T = exact(logp, requires_grad=True), exact(entropy, requires_grad=True)
        value, stats = loss(logp_T, entropy_T)
        if value.requires_grad:
            value.backward()
        grads = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in (logp_T, entropy_T)
        ]
        results.append((value.detach(), grads, stats))
    (fast, my_grads, stats), (slow, slow_grads, _) = results
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=1e-9)
    for grad, other in zip(my_grads, slow_grads, strict=True):
        torch.testing.assert_close(grad, other, atol=1e-9, rtol=1e-9)
    diffs = [abs(o - e) for o, e, m, s in zip(old, engine, mask, stale, strict=True) if m and not s]
    assert stats[DIFF].tolist() == pytest.approx([sum(diffs), len(diffs)], abs=1e-12), (
        "of fresh tokens alone"
    )
    assert stats[DIFF_MAX].tolist() == pytest.approx(
        [max(diffs, default=0.0), len(diffs)], abs=1e-12
    )
    gaps = [o - e for o, e, m, s in zip(old, engine, mask, stale, strict=True) if m and not s]
    kl = sum(min(math.exp(x) - 1 - x, 10.0) for x in gaps)
    assert stats[ENGINE_KL].tolist() == pytest.approx([kl, len(gaps)], abs=1e-9)
    assert stats[FAR].tolist() == [sum(not 0.5 <= math.exp(x) <= 2 for x in gaps), len(gaps)]
    num_dropped = sum(mask) - int(of_kept.loss_mask_T.sum())
    assert int(stats[TOKENS]) == sum(mask) - num_dropped
    if hparams.rollout_correction != "off":
        assert stats[MASKED].tolist() == [num_dropped, sum(mask)], "a share of what was sampled"
        by_age = {
            statistic.name: parts.tolist()
            for statistic, parts in stats.items()
            if statistic.name.startswith("rollout_correction_masked_")
        }
        assert [sum(pair) for pair in zip(*by_age.values(), strict=True)] == [
            num_dropped,
            sum(mask),
        ]


def test_nll_is_the_weighted_sum_over_the_response() -> None:
    row = row_with(torch.tensor([False, True, True]), torch.tensor([0.0, 1.0, 0.5]))
    logp_T = torch.tensor([-9.0, -2.0, -4.0], requires_grad=True)
    loss, stats = nll_loss(logp_T, row)
    loss.backward()
    assert float(loss.detach()) == 4.0
    assert logp_T.grad is not None and logp_T.grad.tolist() == [0.0, -1.0, -0.5]
    assert int(stats[TOKENS]) == 2


outcome_token = st.tuples(floats, floats, st.booleans(), st.booleans())


@settings(max_examples=60)
@given(st.lists(st.lists(outcome_token, min_size=1, max_size=5), min_size=1, max_size=4))
def test_outcome_loss_and_gradient_equal_the_slow_loop(sequences: list[list[Any]]) -> None:
    """-o log sigmoid(r) - (1 - o) log(1 - sigmoid(r)), r = 0.5 sum log(p / p_ref) (arXiv 2502.01456)."""
    columns = zip(*(values for sequence in sequences for values in sequence), strict=True)
    logp, reference, mask, _ = map(list, columns)
    numbers = [number for number, sequence in enumerate(sequences) for _ in sequence]
    outcomes = [float(sequence[0][3]) for sequence in sequences]
    counts = [max(1, sum(token[2] for token in sequence)) for sequence in sequences]
    exact = partial(torch.tensor, dtype=torch.float64)
    weight_T, outcome_T = (
        exact([1 / counts[n] for n in numbers]),
        exact([outcomes[n] for n in numbers]),
    )
    read = {
        "outcome_T": outcome_T,
        "reference_logp_T": exact(reference),
        "sequence_T": torch.tensor(numbers),
    }
    row = row_with(torch.tensor(mask), weight_T, **read)
    logp_T = exact(logp, requires_grad=True)
    loss, stats = outcome_loss(logp_T, row, beta=0.5)
    loss.backward()
    slow_T = exact(logp, requires_grad=True)
    slow, right = torch.zeros((), dtype=torch.float64), 0
    for number, outcome in enumerate(outcomes):
        places = [t for t, n in enumerate(numbers) if n == number and mask[t]]
        if places:
            reward = torch.stack([0.5 * (slow_T[t] - reference[t]) for t in places]).sum()
            slow = slow - (torch.sigmoid(reward).log() if outcome else torch.sigmoid(-reward).log())
            right += len(places) * ((float(reward.detach()) > 0) == bool(outcome))
    torch.testing.assert_close(loss.detach(), slow.detach(), atol=1e-9, rtol=1e-9)
    if slow.requires_grad:
        slow.backward()
    grads = [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (logp_T, slow_T)
    ]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-9)
    assert stats[RIGHT].tolist() == [right, sum(mask)]


value_token = st.tuples(floats, floats, floats, st.booleans(), st.floats(0.01, 1))


def _slow_value_loss(value, row, clip):
    """The larger of two squared errors, and its gradient: 0 where the value has gone too far to be followed."""
    total, grads = 0.0, []
    for t in range(len(value)):
        target, old, weight = (
            float(x[t]) for x in (row.return_T, row.old_value_T, row.loss_weight_T)
        )
        plain = (value[t] - target) ** 2 / 2
        near = value[t] if clip is None else old + min(max(value[t] - old, -clip), clip)
        clipped = (near - target) ** 2 / 2
        if not row.loss_mask_T[t]:
            grads.append(0.0)
            continue
        total += max(plain, clipped) * weight
        # else the two differ by rounding alone
        is_cut = clip is not None and abs(value[t] - old) > clip
        grads.append(0.0 if is_cut and clipped > plain else (value[t] - target) * weight)
    return total, grads


@settings(max_examples=100)
@given(st.lists(value_token, min_size=1, max_size=12), st.data())
def test_value_loss_and_gradient_equal_the_slow_loop(tokens, data):
    value, target, old, mask, weight = (list(column) for column in zip(*tokens, strict=True))
    weight_T, return_T, old_value_T = (
        torch.tensor(x, dtype=torch.float64) for x in (weight, target, old)
    )
    row = row_with(torch.tensor(mask), weight_T, return_T=return_T, old_value_T=old_value_T)
    limit = data.draw(st.sampled_from([None, 0.2, 1.0]))
    value_T = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    loss, stats = value_loss(value_T, row, value_clip=limit)
    loss.backward()
    expected, grads = _slow_value_loss(value, row, limit)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert value_T.grad is not None
    on_edge = [
        limit is not None and abs(abs(v - o) - limit) < 1e-9
        for v, o in zip(value, old, strict=True)
    ]
    same = [
        abs((v - r) ** 2 - (o - r) ** 2) < 1e-12 for v, r, o in zip(value, target, old, strict=True)
    ]
    for grad, other, is_tie in zip(
        value_T.grad.tolist(), grads, map(max, on_edge, same), strict=True
    ):
        assert is_tie or grad == pytest.approx(other, abs=1e-12)
    errors = [r - o for r, o, m in zip(target, old, mask, strict=True) if m]
    *_, error, error_square, count = stats[EXPLAINED_VARIANCE].tolist()
    assert (error, error_square) == pytest.approx(
        (sum(errors), sum(e * e for e in errors)), abs=1e-12
    )
    assert count == sum(mask)
