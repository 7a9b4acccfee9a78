"""Token advantages and returns, computed from the rewards of responses and from token values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megarl.algos import Algorithm
from megarl.algos.advantages import gae
from megarl.algos.losses import kl_T
from megarl.training.batching import SampleRef, TokenValues, key_of, spread
from megarl.types import FloatArray, Hyperparameters, TrainSequence, sample_numbers
from megarl.types.arrays import TokenArrays

PerToken = list[FloatArray]  # one array per sequence, aligned like the sequence's own
# this rank's values and those of the batch's other ranks
ReduceOverDp = Callable[[Tensor], Tensor]


def with_token_advantages(
    row: Algorithm,
    hyperparameters: Hyperparameters,
    refs: Sequence[SampleRef],
    sequences: Sequence[TrainSequence],
    token_values: TokenValues,
    penalties: TokenArrays | None,
    *,
    sum_over_all: ReduceOverDp,
    max_over_all: ReduceOverDp,
) -> list[TrainSequence]:
    """The sequences with the advantage of each token, as the algorithm computes it; demonstrations get none.

    All sampled tokens make up the chains of rewards and values, also those that a rollout correction drops; whitening
    is over those that it keeps. refs: the sequences' samples. token_values: of the auxiliary model, for the responses'
    tokens. penalties: each token's KL penalty, if any. The rows of a sample are all among the sequences: its tokens are
    one chain.
    """
    if row.credits_turns:
        token_rewards = with_turn_rewards(sequences, penalties)
    else:
        token_rewards = penalties
    # the same in samples without a turn's reward
    is_discounted = row.credits_turns and hyperparameters.gamma < 1
    if row.critic == "values":
        advantages, _ = gae_advantages(
            sequences,
            _on_sequences(token_values, refs),
            gamma=hyperparameters.gamma,
            lam=hyperparameters.gae_lambda,
            alpha=hyperparameters.lambda_alpha or None,
            rewards=token_rewards,
        )
    elif row.advantage is None:
        return list(sequences)
    elif row.critic == "process_rewards" or token_rewards is not None or is_discounted:
        # the discounted sum of a token's own and later rewards and of the sample's advantage (arXiv 2501.03262)
        zeros = [np.zeros(ref.length, np.float32) for ref in refs]
        rewards = list(token_rewards or zeros)
        if row.critic:
            process = leave_one_out_process_rewards(
                refs, sequences, _on_sequences(token_values, refs), sum_over_all, max_over_all
            )
            rewards = [one_T + other_T for one_T, other_T in zip(rewards, process, strict=True)]
        advantages, _ = gae_advantages(
            sequences,
            zeros,
            gamma=hyperparameters.gamma,
            lam=1.0,
            rewards=rewards,
            last_rewards=_sample_advantages(refs),
        )
    else:
        advantages = sample_advantages(refs, sequences)
    pairs = zip(sequences, advantages, strict=True)
    with_advantages = [replace(sequence, advantage_T=own_T) for sequence, own_T in pairs]
    if hyperparameters.whiten:
        return whitened(with_advantages, sum_over_all)
    return with_advantages


def _on_sequences(token_values: TokenValues, refs: Sequence[SampleRef]) -> PerToken:
    """The auxiliary model's values of these samples, aligned like their sequences."""
    return [spread(token_values[key_of(ref)], ref) for ref in refs]


def sample_advantages(refs: Sequence[SampleRef], sequences: Sequence[TrainSequence]) -> PerToken:
    """Each token's advantage: that of its sample."""
    pairs = zip(_sample_advantages(refs), sequences, strict=True)
    return [
        np.where(sequence.sampled_T, advantage, np.float32(0.0)) for advantage, sequence in pairs
    ]


def gae_advantages(
    sequences: Sequence[TrainSequence],
    values: TokenArrays,
    *,
    gamma: float,
    lam: float,
    alpha: float | None = None,
    rewards: TokenArrays | None = None,
    last_rewards: Sequence[np.float32] | None = None,
) -> tuple[PerToken, PerToken]:
    """(advantages, returns) by GAE; the reward of a sample, or what last_rewards has of it, comes with its last token.

    values: of the state before each token; rewards: of each token, added to the sample's. Only trained tokens are read.
    alpha: lambda is max(0, 1 - 1 / (alpha x trained tokens of the sample)) instead of lam (VAPO, arXiv 2504.05118,
    eq. 8).
    """
    if not sequences:
        return [], []
    ends_with = last_rewards or [sequence.reward for sequence in sequences]
    chains = _chains(sequences)
    order = [place for chain in chains for place in chain]
    masks = [sequences[place].sampled_T for place in order]
    lengths = np.array([int(mask_T.sum()) for mask_T in masks])
    of_samples = np.add.reduceat(lengths, np.cumsum([0, *map(len, chains[:-1])]))
    if alpha is None:
        lams = np.full(len(chains), lam)
    else:
        lams = np.maximum(0.0, 1 - 1 / (alpha * of_samples))
    ends = np.cumsum(of_samples) - 1
    is_last_T = np.zeros(lengths.sum(), np.bool_)
    reward_T = np.zeros(lengths.sum())
    if rewards is not None:
        reward_T += _on_responses([rewards[place] for place in order], masks)
    is_last_T[ends] = True
    reward_T[ends] += np.array([ends_with[chain[-1]] for chain in chains])
    value_T = _on_responses([values[place] for place in order], masks)
    lam_T = torch.from_numpy(np.repeat(lams, of_samples))
    advantages, returns = (
        [np.zeros(len(sequence.token_ids_T), np.float32) for sequence in sequences]
        for _ in range(2)
    )
    flat_results = gae(
        *map(torch.from_numpy, (reward_T, value_T, is_last_T)), gamma=gamma, lam=lam_T
    )
    for arrays, flat_T in zip((advantages, returns), flat_results, strict=True):
        parts = np.split(flat_T.numpy(), np.cumsum(lengths)[:-1])
        for place, mask_T, part_T in zip(order, masks, parts, strict=True):
            arrays[place][mask_T] = part_T
    return advantages, returns


def _sample_advantages(refs: Sequence[SampleRef]) -> list[np.float32]:
    return [np.float32(ref.advantage) for ref in refs if ref.advantage is not None]


def _chains(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """The places of the sequences of each sample, in the order of its rows."""
    chains: dict[int, list[int]] = {}
    for place, sample in enumerate(sample_numbers(sequences).tolist()):
        chains.setdefault(sample, []).append(place)
    return [
        sorted(places, key=lambda place: sequences[place].key or ()) for places in chains.values()
    ]


def with_turn_rewards(
    sequences: Sequence[TrainSequence], penalties: TokenArrays | None
) -> TokenArrays | None:
    """Each token's own reward: its KL penalty, and a turn's reward at the turn's last token; None: there is none."""
    of_turns = [sequence.token_rewards_T for sequence in sequences]
    if all(one_T is None for one_T in of_turns):
        return penalties
    token_penalties = penalties or [
        np.zeros(len(sequence.token_ids_T), np.float32) for sequence in sequences
    ]
    pairs = zip(token_penalties, of_turns, strict=True)
    return [one_T if turns_T is None else one_T + turns_T for one_T, turns_T in pairs]


def kl_penalties(
    old_logp: TokenArrays,
    reference_logp: TokenArrays,
    hyperparameters: Hyperparameters,
) -> list[FloatArray]:
    """Each token's reward -kl_coefficient x KL(old policy | reference) (arXiv 2203.02155, eq. 2)."""
    pairs = zip(map(torch.from_numpy, old_logp), map(torch.from_numpy, reference_logp), strict=True)
    kls = [kl_T(*pair, hyperparameters.kl_estimator).numpy() for pair in pairs]
    return [(-hyperparameters.kl_coefficient * one_T).astype(np.float32) for one_T in kls]


def leave_one_out_process_rewards(
    refs: Sequence[SampleRef],
    sequences: Sequence[TrainSequence],
    process: TokenArrays,
    sum_over_all: ReduceOverDp,
    max_over_all: ReduceOverDp,
) -> PerToken:
    """Process rewards of each token, minus the mean over the group's other samples of the mean of all their tokens.

    A sample without others has none, as its outcome has no advantage then. (PRIME, arXiv 2502.01456.)
    """
    chains = _chains(sequences)
    trained = [
        one_T[sequence.sampled_T] for one_T, sequence in zip(process, sequences, strict=True)
    ]
    means = np.array(
        [np.concatenate([trained[place] for place in chain]).mean() for chain in chains]
    )
    # ranks that have the same sequence count it together as one
    shares = torch.tensor([1 / sequences[chain[0]].cp for chain in chains], dtype=torch.float64)
    places = torch.tensor([refs[chain[0]].group for chain in chains], dtype=torch.int64)
    last = int(max_over_all(torch.tensor(max((ref.group for ref in refs), default=0))))
    sums_N = torch.zeros(2, last + 1, dtype=torch.float64)
    sums_N[0].index_add_(0, places, torch.from_numpy(means.astype(np.float64)) * shares)
    sums_N[1].index_add_(0, places, shares)
    totals, counts = sum_over_all(sums_N)[:, places].numpy()
    of_samples = (totals - means) / np.maximum(counts - 1, 1)
    numbers = sample_numbers(sequences)
    rows = zip(process, sequences, of_samples[numbers], counts[numbers] > 1, strict=True)
    return [
        np.where(sequence.sampled_T & is_compared, one_T - baseline, 0.0).astype(np.float32)
        for one_T, sequence, baseline, is_compared in rows
    ]


def whitened(sequences: Sequence[TrainSequence], sum_over_all: ReduceOverDp) -> list[TrainSequence]:
    """The sequences with advantages (A - mean) / (std + 1e-8), over all tokens that are trained on.

    All of them have advantages. Ranks that have the same sequence count it together as one.
    (As is usual with PPO, e.g. arXiv 2006.05990, section 3.5.)
    """
    advantages = [
        sequence.advantage_T for sequence in sequences if sequence.advantage_T is not None
    ]
    masks = [sequence.loss_mask_T for sequence in sequences]
    learnt_T = torch.from_numpy(_on_responses(advantages, masks)).double()
    lengths = np.array([mask_T.sum() for mask_T in masks], np.int64)
    shares = np.array([1 / sequence.cp for sequence in sequences], np.float64)
    share_T = torch.from_numpy(np.repeat(shares, lengths))
    count, total = sum_over_all(torch.stack([share_T.sum(), (share_T * learnt_T).sum()]))
    mean = float(total / count)
    variance = float(sum_over_all((share_T * (learnt_T - mean) ** 2).sum()[None])[0] / count)
    deviation = variance**0.5 + 1e-8
    whitened_arrays = [
        np.where(mask_T, (own_T.astype(np.float64) - mean) / deviation, 0.0).astype(np.float32)
        for own_T, mask_T in zip(advantages, masks, strict=True)
    ]
    return [
        replace(sequence, advantage_T=own_T)
        for sequence, own_T in zip(sequences, whitened_arrays, strict=True)
    ]


def _on_responses(arrays: TokenArrays, masks: Sequence[np.ndarray]) -> np.ndarray:
    """The responses' tokens of each array, end to end."""
    parts = [one_T[mask_T] for one_T, mask_T in zip(arrays, masks, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *parts])
