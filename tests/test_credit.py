"""From rewards and values to the tokens of ragged sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.credit import by_values, whitened
from megarl.types import TrainSequence


def sequence(prompt: int, response: int, reward: float) -> TrainSequence:
    mask_T = np.arange(prompt + response) >= prompt
    zeros_T = np.zeros(prompt + response, np.float32)
    return TrainSequence(zeros_T.astype(np.int64), mask_T, zeros_T, (mask_T * reward).astype(np.float32), zeros_T)


def test_a_reward_comes_with_the_last_token() -> None:
    sequences = [sequence(2, 3, 1.0), sequence(1, 1, -1.0)]
    values = [np.array([9, 9, 0.5, 0.25, 0.75], np.float32), np.array([9, 0.5], np.float32)]
    advantages, returns = by_values(sequences, values, gamma=1.0, lam=0.5)
    # deltas: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75; each takes half of what comes after it
    assert advantages[0].tolist() == [0, 0, -0.25 + 0.25 + 0.0625, 0.5 + 0.125, 0.25]
    assert advantages[1].tolist() == [0, -1.5]
    assert returns[0].tolist() == [0, 0, 0.5625, 0.875, 1.0]
    assert returns[1].tolist() == [0, -1.0]


def test_long_responses_have_a_longer_memory() -> None:
    """lambda = 1 - 1 / (0.5 x length), but not below 0: 0 of one token or two, 1/3 of three."""
    sequences = [sequence(1, 3, 1.0), sequence(1, 2, 1.0), sequence(1, 1, 1.0)]
    values = [np.zeros(4, np.float32), np.zeros(3, np.float32), np.zeros(2, np.float32)]
    advantages, _ = by_values(sequences, values, gamma=1.0, lam=0.95, alpha=0.5)
    assert advantages[0].tolist() == pytest.approx([0, 1 / 9, 1 / 3, 1])
    assert [one.tolist() for one in advantages[1:]] == [[0, 0, 1], [0, 1]]


def test_no_sequences() -> None:
    assert by_values([], [], gamma=1.0, lam=0.9) == ([], [])


@pytest.mark.parametrize("parts", [[3], [1, 2], [2, 0, 1]])
def test_whitening_is_over_all_parts_of_a_batch(parts: list[int]) -> None:
    """As if one rank had everything; a rank without sequences changes nothing."""
    sequences = [sequence(2, 3, 1.0), sequence(1, 1, 0.0), sequence(4, 2, 0.5)]
    rng = np.random.default_rng(1)
    advantages = [(rng.normal(5, 2, len(one.loss_mask_T)) * one.loss_mask_T).astype(np.float32) for one in sequences]
    everything = np.concatenate([a[one.loss_mask_T] for a, one in zip(advantages, sequences, strict=True)])
    cuts = np.cumsum([0, *parts])
    slices = [slice(*cuts[i : i + 2]) for i in range(len(parts))]

    def run(sums: list[torch.Tensor]) -> tuple[list[TrainSequence], list[list[torch.Tensor]]]:
        asked: list[list[torch.Tensor]] = []
        found: list[TrainSequence] = []
        for part in slices:
            calls: list[torch.Tensor] = []

            def add_up(values: torch.Tensor, calls: list[torch.Tensor] = calls) -> torch.Tensor:
                calls.append(values)
                return sums[len(calls) - 1] if len(calls) <= len(sums) else values

            given = zip(sequences[part], advantages[part], strict=True)
            found += whitened([replace(one, advantage_T=one_T) for one, one_T in given], add_up)
            asked.append(calls)
        return found, asked

    sums: list[torch.Tensor] = []
    for stage in range(2):  # what the ranks would have added up in each of the two reductions
        _, asked = run(sums)
        sums.append(torch.stack([calls[stage] for calls in asked]).sum(0))
    found, _ = run(sums)
    mine = np.concatenate([one.advantage_T[one.loss_mask_T] for one in found])
    np.testing.assert_allclose(mine, (everything - everything.mean()) / everything.std(), atol=1e-5)
    assert not any(one.advantage_T[~one.loss_mask_T].any() for one in found)
