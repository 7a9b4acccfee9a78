"""The recurrence behind GAE against a loop from the last token to the first, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.algos.advantages import gae, reverse_scan

BLOCK = 1 << 18  # tokens that gae works on at once


def slow(own: list[float], decay: list[float]) -> list[float]:
    sums, behind = [], 0.0
    for value, factor in zip(reversed(own), reversed(decay), strict=True):
        behind = value + factor * behind
        sums.append(behind)
    return sums[::-1]


def close(found_T: torch.Tensor, expected: list[float]) -> None:
    expected_T = torch.tensor(expected, dtype=torch.float64)
    assert found_T.shape == expected_T.shape and found_T.dtype == torch.float64
    torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(
    st.integers(0, 3000),
    st.integers(1, 500),
    st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    st.integers(0, 2**31),
)
@example(0, 1, 1.0, 0)
@example(32, 40, 1.0, 0)
@example(33, 40, 1.0, 0)
@example(1024, 5000, 1.0, 0)
@example(1025, 5000, 1.0, 0)
def test_any_length_equals_the_loop(count: int, longest: int, decay: float, seed: int) -> None:
    """Whichever way the lengths lie to the chunks; a decay of 0 lets nothing through."""
    generator = torch.Generator().manual_seed(seed)
    own_T = torch.randn(count, generator=generator, dtype=torch.float64)
    is_end_T = torch.rand(count, generator=generator) < 1 / longest
    decay_T = torch.where(is_end_T, 0.0, torch.full((count,), decay, dtype=torch.float64))
    close(reverse_scan(own_T, decay_T), slow(own_T.tolist(), decay_T.tolist()))


LENGTHS = {
    "one token each": [1] * 100,
    "ends before, on and behind a block's": [BLOCK - 1, 1, 1, BLOCK - 2, 2],
    "one over three blocks": [5, 2 * BLOCK + 37],
    "a ragged tail": [3, 32_768, 1, 32_768, 31, 200_000, 1, 9_999],
    "none": [],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, None)])
def test_gae_over_blocks_of_tokens(lengths: list[int], gamma: float, lam: float | None) -> None:
    """Lambda None: of each token its own."""
    count, generator = sum(lengths), torch.Generator().manual_seed(5)
    reward_T, value_T = (torch.randn(count, generator=generator) for _ in range(2))
    lam_T = torch.rand(count, generator=generator, dtype=torch.float64)
    is_last_T = torch.zeros(count, dtype=torch.bool)
    is_last_T[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = True
    given_lam: Any = lam_T if lam is None else lam
    advantage_T, return_T = gae(reward_T, value_T, is_last_T, gamma=gamma, lam=given_lam)
    values, ends = value_T.tolist(), is_last_T.tolist()
    following = [0.0 if end else value for value, end in zip([*values, 0.0][1:], ends, strict=True)]
    deltas = [
        r + gamma * after - v
        for r, v, after in zip(reward_T.tolist(), values, following, strict=True)
    ]
    factors = lam_T.double().tolist() if lam is None else [lam] * count
    decays = [0.0 if end else gamma * factor for factor, end in zip(factors, ends, strict=True)]
    close(advantage_T, slow(deltas, decays))
    close(return_T, (advantage_T + value_T.double()).tolist())


def test_the_same_numbers_every_time_and_nothing_given_is_changed() -> None:
    reward_T, value_T = torch.randn(2, BLOCK + 100).double()
    is_last_T = torch.arange(BLOCK + 100) % 1000 == 99
    lam_T = torch.full_like(value_T, 0.9)
    before = [tensor.clone() for tensor in (reward_T, value_T, is_last_T, lam_T)]
    results, again = (gae(reward_T, value_T, is_last_T, gamma=0.9, lam=lam_T) for _ in range(2))
    assert all(torch.equal(tensor, other) for tensor, other in zip(results, again, strict=True))
    assert all(
        torch.equal(*pair)
        for pair in zip(before, (reward_T, value_T, is_last_T, lam_T), strict=True)
    )
