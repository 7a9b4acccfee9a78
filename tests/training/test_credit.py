"""From rewards and values to the tokens of ragged sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algos import ALGORITHMS
from megarl.training.batching import SampleRef, TokenValues
from megarl.training.credit import gae_advantages, kl_penalties, whitened, with_token_advantages
from megarl.types import Hyperparameters, TrainSequence


def sequence(prompt: int, response: int, reward: float) -> TrainSequence:
    mask_T = np.arange(prompt + response) >= prompt
    zeros_T = np.zeros(prompt + response, np.float32)
    return TrainSequence(zeros_T.astype(np.int64), mask_T, zeros_T, zeros_T, reward=reward)


def learnt(one: TrainSequence) -> np.ndarray:
    """The advantages of the tokens that are trained on; the others have 0."""
    assert one.advantage_T is not None and not one.advantage_T[~one.loss_mask_T].any()
    return one.advantage_T[one.loss_mask_T]


def test_long_responses_have_a_longer_memory() -> None:
    """lambda = 1 - 1 / (0.5 x length), but not below 0: 0 of one token or two, 1/3 of three."""
    sequences = [sequence(1, 3, 1.0), sequence(1, 2, 1.0), sequence(1, 1, 1.0)]
    values = [np.zeros(4, np.float32), np.zeros(3, np.float32), np.zeros(2, np.float32)]
    advantages, _ = gae_advantages(sequences, values, gamma=1.0, lam=0.95, alpha=0.5)
    assert advantages[0].tolist() == pytest.approx([0, 1 / 9, 1 / 3, 1])
    assert [advantage_T.tolist() for advantage_T in advantages[1:]] == [[0, 0, 1], [0, 1]]


def test_no_sequences() -> None:
    assert gae_advantages([], [], gamma=1.0, lam=0.9) == ([], [])


@pytest.mark.parametrize("parts", [[3], [1, 2], [2, 0, 1]])
def test_whitening_is_over_all_parts_of_a_batch(parts: list[int]) -> None:
    """As if one rank had everything; a rank without sequences changes nothing."""
    sequences = [sequence(2, 3, 1.0), sequence(1, 1, 0.0), sequence(4, 2, 0.5)]
    rng = np.random.default_rng(1)
    advantages = [
        (rng.normal(5, 2, len(train_sequence.loss_mask_T)) * train_sequence.loss_mask_T).astype(
            np.float32
        )
        for train_sequence in sequences
    ]
    everything = np.concatenate(
        [
            a[train_sequence.loss_mask_T]
            for a, train_sequence in zip(advantages, sequences, strict=True)
        ]
    )
    cuts = np.cumsum([0, *parts])
    slices = [slice(*cuts[i : i + 2]) for i in range(len(parts))]

    def run(sums: list[torch.Tensor]) -> tuple[list[TrainSequence], list[list[torch.Tensor]]]:
        asked: list[list[torch.Tensor]] = []
        results: list[TrainSequence] = []
        for part in slices:
            calls: list[torch.Tensor] = []

            def add_up(values: torch.Tensor, calls: list[torch.Tensor] = calls) -> torch.Tensor:
                calls.append(values)
                return sums[len(calls) - 1] if len(calls) <= len(sums) else values

            pairs = zip(sequences[part], advantages[part], strict=True)
            results += whitened(
                [replace(train_sequence, advantage_T=one_T) for train_sequence, one_T in pairs],
                add_up,
            )
            asked.append(calls)
        return results, asked

    sums: list[torch.Tensor] = []
    for stage in range(2):  # what the ranks would have added up in each of the two reductions
        _, asked = run(sums)
        sums.append(torch.stack([calls[stage] for calls in asked]).sum(0))
    results, _ = run(sums)
    flat = np.concatenate([learnt(train_sequence) for train_sequence in results])
    np.testing.assert_allclose(flat, (everything - everything.mean()) / everything.std(), atol=1e-5)


def process_refs(sequences: list[TrainSequence], groups: list[int]) -> list[SampleRef]:
    """Samples of these groups, numbered within them."""
    refs = []
    for index, (train_sequence, group) in enumerate(zip(sequences, groups, strict=True)):
        length, response = len(train_sequence.loss_mask_T), int(train_sequence.loss_mask_T.sum())
        number = groups[:index].count(group)
        refs.append(
            SampleRef(
                group,
                number,
                length,
                response,
                reward=train_sequence.reward,
                advantage=train_sequence.reward,
            )
        )
    return refs


def process_advantages(
    sequences: list[TrainSequence],
    refs: list[SampleRef],
    process: TokenValues,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> list[list[float]]:
    """PRIME's advantages of the trained tokens of each sequence; add_up: sums over all data-parallel ranks."""
    row = ALGORITHMS["prime"]
    credited = with_token_advantages(
        row, row.hyperparameters, refs, sequences, process, None, sum_over_all=add_up,
        max_over_all=lambda _: torch.tensor(2),
    )  # fmt: skip
    return [learnt(train_sequence).tolist() for train_sequence in credited]


def test_process_rewards_are_held_against_the_others() -> None:
    """arXiv 2502.01456: less the mean of the others' means; a group of one has none."""
    sequences = [
        sequence(2, 2, 0.5),
        sequence(1, 1, -0.5),
        sequence(3, 2, 0.0),
        sequence(1, 2, 0.25),
    ]
    process = {
        (0, 0, 0): np.array([1.0, 3.0], np.float32),  # the others' means: 4 and 0.5
        (0, 1, 0): np.array([4.0], np.float32),  # 2 and 0.5
        (0, 2, 0): np.array([0.5, 0.5], np.float32),  # 2 and 4
        (2, 0, 0): np.array([1.0, -1.0], np.float32),
    }
    expected = [
        [(1 - 2.25) + (3 - 2.25) + 0.5, (3 - 2.25) + 0.5], [4 - 1.25 - 0.5], [-5.0, -2.5], [0.25, 0.25],
    ]  # fmt: skip
    refs = process_refs(sequences, [0, 0, 0, 2])
    assert process_advantages(sequences, refs, process) == expected
    # Two ranks find the same: what each adds up is all that it tells the other, whose group may be in part its own.
    parts, sent = (slice(0, 1), slice(1, 4)), []
    for part in parts:
        process_advantages(
            sequences[part], refs[part], process, lambda sums: sent.append(sums) or sums
        )
    advantages = [
        process_advantages(sequences[part], refs[part], process, lambda _: sent[0] + sent[1])
        for part in parts
    ]
    assert [*advantages[0], *advantages[1]] == expected


@pytest.mark.parametrize(("estimator", "expected"), [("k1", [0.0, -0.1]), ("k2", [0.0, -0.05])])
def test_penalties_are_the_estimators(estimator: str, expected: list[float]) -> None:
    hparams = Hyperparameters(kl_coefficient=0.1, kl_estimator=estimator, kl_place="reward")  # type: ignore[arg-type]
    old, reference = (np.array(logps, np.float32) for logps in ([-2.0, -1.0], [-2.0, -2.0]))
    (penalties,) = kl_penalties([old], [reference], hparams)
    assert penalties.tolist() == pytest.approx(expected)
    assert penalties.dtype == np.float32
