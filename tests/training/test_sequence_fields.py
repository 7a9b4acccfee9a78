"""Every field of a training sequence holds what its name says, for every algorithm, from a group's rewards on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megarl.algos import ALGORITHMS, Algorithm
from megarl.controller.samples import samples_of
from megarl.training.batching import SampleRef, key_of
from megarl.training.credit import with_token_advantages
from megarl.training.train_sequences import train_sequence
from megarl.types import Prompt, SampleGroup, TrainSequence
from tests.samples.responses import response
from tests.tracking.test_metrics import group as summary_of

REWARDS, GREEDY_REWARD, CORRECT, LENGTHS = [1.0, 0.0, 0.5], 0.25, [True, False, False], [1, 2, 3]
PROMPT = (7, 8, 9, 7, 8)  # as long as the summaries say
# What is computed for each response's tokens: by the auxiliary model, and as KL penalties.
VALUES = [[0.5], [0.25, -0.5], [0.125, 0.75, 1.0]]
PENALTIES = [[-0.25], [-0.5, -0.125], [-0.0625, 0.0, -1.0]]


@dataclass(frozen=True)
class Step:
    row: Algorithm
    refs: list[SampleRef]
    made: list[TrainSequence]
    with_token_advantages: list[TrainSequence]


def step_of(name: str) -> Step:
    """One group's samples, as the controller names them, as a rank makes them, and with their tokens' advantages."""
    row = ALGORITHMS[name]
    greedy = [GREEDY_REWARD] * row.greedy_baseline
    summary = summary_of("p", REWARDS + greedy, [*LENGTHS, *[1] * len(greedy)])
    correct_G = np.array(CORRECT + [True] * len(greedy))
    summary = replace(summary, correct_G=correct_G, baseline=len(REWARDS) if greedy else None)
    refs = samples_of([summary], name, version=4)
    samples = tuple(
        response(
            PROMPT,
            np.arange(n),
            np.full(n, -n, np.float32),
            version=3,
            routed_experts=np.full((len(PROMPT) + n - 1, 2, 2), n, np.uint8),
        )
        for n in LENGTHS
    )
    # The rewards of the object store are those from before reward model and overlong penalty: they are not read.
    unread = np.full(len(LENGTHS), np.nan, np.float32)
    group = SampleGroup(Prompt("p", "", PROMPT, ""), samples, unread, unread > 0)
    hparams = row.hyperparameters
    sequences = [train_sequence(group, ref, hparams.aggregation, 0.5) for ref in refs]
    values = {key_of(ref): np.array(VALUES[ref.sample], np.float32) for ref in refs}
    pays = (
        [np.array([9.0] * len(PROMPT) + penalties, np.float32) for penalties in PENALTIES]
        if hparams.pays_kl
        else None
    )
    alone = {"sum_over_all": lambda one: one, "max_over_all": lambda one: one}
    return Step(
        row,
        refs,
        sequences,
        with_token_advantages(row, hparams, refs, sequences, values, pays, **alone),
    )


def later_sum(own: list[float], last: float, gamma: float = 1.0) -> list[float]:
    sums, behind = [], last
    for place, value in enumerate(reversed(own)):
        behind = value + (behind if place == 0 else gamma * behind)
        sums.insert(0, behind)
    return sums


def by_gae(index: int, lam: float, pays: bool) -> list[float]:
    """Of the response's reward at its last token, the KL penalties and the values; gamma 1."""
    rewards = list(PENALTIES[index]) if pays else [0.0] * LENGTHS[index]
    rewards[-1] += REWARDS[index]
    following = [*VALUES[index][1:], 0.0]
    advantages, behind = [], 0.0
    for reward, value, after in reversed(list(zip(rewards, VALUES[index], following, strict=True))):
        behind = reward + after - value + lam * behind
        advantages.insert(0, behind)
    return advantages


def less_others(own: list[float], index: int) -> float:
    others = own[:index] + own[index + 1 :]
    return own[index] - sum(others) / len(others)


def normalised(index: int) -> float:
    return (REWARDS[index] - 0.5) / (float(np.std(REWARDS, ddof=1)) + 1e-6)


def process(index: int) -> list[float]:
    means = [sum(values) / len(values) for values in VALUES]
    baseline = means[index] - less_others(means, index)
    return later_sum([value - baseline for value in VALUES[index]], less_others(REWARDS, index))


def centred(index: int) -> float:
    return REWARDS[index] - 0.5


EXPECTED: dict[str, Callable[[int], float | list[float] | None]] = {
    "grpo": normalised,
    "dapo": normalised,
    "gspo": normalised,
    "cispo": normalised,
    "dr_grpo": centred,
    "reinforce_pp_baseline": centred,
    "rloo": lambda index: less_others(REWARDS, index),
    "remax": lambda index: REWARDS[index] - GREEDY_REWARD,
    "reinforce_pp": lambda index: later_sum(PENALTIES[index], REWARDS[index]),
    "on_policy_distillation": lambda index: PENALTIES[index],
    "prime": process,
    "ppo": lambda index: by_gae(index, 0.95, pays=True),
    "vapo": lambda index: by_gae(index, max(0.0, 1 - 1 / (0.05 * LENGTHS[index])), pays=False),
    "sft": lambda index: None,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rewards_and_outcomes_are_the_samples_own(name: str) -> None:
    step = step_of(name)
    for sequences in (step.made, step.with_token_advantages):
        assert [sequence.reward for sequence in sequences] == REWARDS
        assert [sequence.outcome for sequence in sequences] == [1.0, 0.0, 0.0]
        assert [sequence.nll_weight_T is not None for sequence in sequences] == CORRECT
        assert all((sequence.is_stale_T == sequence.loss_mask_T).all() for sequence in sequences)
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            assert sequence.loss_mask_T.tolist() == [False] * len(PROMPT) + [True] * length
            assert sequence.token_ids_T.tolist() == [*PROMPT, *range(length)]
            assert sequence.engine_logp_T[sequence.loss_mask_T].tolist() == [-length] * length
            assert sequence.experts_TMK is not None and (sequence.experts_TMK == length).all()
            assert len(sequence.experts_TMK) == len(PROMPT) + length - 1
            share = 1 / length if step.row.hyperparameters.aggregation == "sequence_mean" else 1.0
            np.testing.assert_array_equal(
                sequence.loss_weight_T, np.float32(share) * sequence.loss_mask_T
            )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_advantages_or_absent(name: str) -> None:
    """None until they are computed, then what the paper has; and none at all for demonstrations."""
    step = step_of(name)
    if step.row.critic == "values":
        assert [ref.advantage for ref in step.refs] == [None] * len(LENGTHS)
    assert [sequence.advantage_T for sequence in step.made] == [None] * len(LENGTHS)
    by_hand = [EXPECTED[name](index) for index in range(len(LENGTHS))]
    if None in by_hand:
        assert [sequence.advantage_T for sequence in step.with_token_advantages] == by_hand
        return
    expected = [
        np.broadcast_to(np.array(advantage, float), length)
        for advantage, length in zip(by_hand, LENGTHS, strict=True)
    ]
    if step.row.hyperparameters.whiten:
        flat = np.concatenate(expected)
        expected = [(values - flat.mean()) / flat.std() for values in expected]
    for sequence, expected_T in zip(step.with_token_advantages, expected, strict=True):
        assert sequence.advantage_T is not None
        np.testing.assert_allclose(
            sequence.advantage_T, [*[0.0] * len(PROMPT), *expected_T], rtol=1e-5, atol=1e-6
        )
