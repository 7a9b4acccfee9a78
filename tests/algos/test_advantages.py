"""Group advantages against numbers worked out by hand."""

from __future__ import annotations

import torch

from megarl.algos.advantages import group_normalised


def test_two_of_four_correct():
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735
    advantage_G = group_normalised(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    expected = 0.5 / (0.5773502691896258 + 1e-6)
    torch.testing.assert_close(advantage_G, torch.tensor([expected, -expected, -expected, expected]).double())


def test_equal_rewards_teach_nothing():
    assert group_normalised(torch.full((8,), 0.7)).abs().max() < 1e-6


def test_a_group_of_one_has_no_spread():
    assert group_normalised(torch.tensor([3.0])).tolist() == [0.0]
