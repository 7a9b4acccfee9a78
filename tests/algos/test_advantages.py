"""Group advantages against numbers worked out by hand, GAE against the paper's sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos.advantages import centred, gae, group_normalised, leave_one_out


def test_two_of_four_correct():
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735
    advantage_G = group_normalised(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    expected = 0.5 / (0.5773502691896258 + 1e-6)
    torch.testing.assert_close(
        advantage_G, torch.tensor([expected, -expected, -expected, expected]).double()
    )


def test_a_group_of_one_has_no_spread():
    assert group_normalised(torch.tensor([3.0])).tolist() == [0.0]


def test_centred_and_leave_one_out_by_hand():
    rewards_G = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5])
    torch.testing.assert_close(centred(rewards_G), rewards_G.double() - 0.5)
    expected = [1 - 1.5 / 4, 0 - 2.5 / 4, 0 - 2.5 / 4, 1 - 1.5 / 4, 0.5 - 2 / 4]
    torch.testing.assert_close(leave_one_out(rewards_G), torch.tensor(expected).double())
    assert leave_one_out(torch.tensor([0.7])).tolist() == [0.0], "nobody to be better than"


def slow_gae(rewards, values, gamma, lam):
    """One response: A_t = sum over l of (gamma lam)^l delta_t+l (arXiv 1506.02438, eq. 16), the last state worth 0."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    count = len(deltas)
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)
    ]


step = st.tuples(st.floats(-2, 2), st.floats(-2, 2))
responses = st.lists(st.lists(step, min_size=1, max_size=17), min_size=1, max_size=6)


@settings(max_examples=100)
@given(responses, st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_equals_the_papers_sums_in_every_response(responses, gamma, lam):
    flat = torch.tensor(
        [token for response in responses for token in response], dtype=torch.float64
    )
    ends = torch.tensor([len(response) for response in responses]).cumsum(0) - 1
    is_last_T = torch.zeros(len(flat), dtype=torch.bool).index_fill(0, ends, True)
    advantage_T, return_T = gae(flat[:, 0], flat[:, 1], is_last_T, gamma=gamma, lam=lam)
    expected = [
        a
        for response in responses
        for a in slow_gae([r for r, _ in response], [v for _, v in response], gamma, lam)
    ]
    assert advantage_T.tolist() == pytest.approx(expected, abs=1e-12)
    assert (return_T - flat[:, 1]).tolist() == pytest.approx(expected, abs=1e-12)
