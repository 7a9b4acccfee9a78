"""From samples to token-balanced micro-batches for every data-parallel rank. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.types import SampleGroup, TrainSequence


@dataclass(frozen=True)
class SampleRef:
    """One sample to train on: sample `sample` of group `group`; length counts prompt and response tokens."""

    group: int
    sample: int
    length: int
    response_length: int
    advantage: float


MicroBatch = tuple[SampleRef, ...]


@dataclass(frozen=True)
class Update:
    """One optimizer update: micro_batches[dp_rank] are that rank's; the loss sum of all is divided by denominator.

    tokens and loss_tokens are counted over all ranks: prompts and responses, and responses alone.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    denominator: float
    tokens: int
    loss_tokens: int


def plan_updates(
    samples: Sequence[SampleRef], *, updates: int, dp: int, token_budget: int, mean_over: Literal["tokens", "sequences"]
) -> list[Update]:
    """Split samples, in order, into `updates` equal optimizer updates and balance each over the dp ranks.

    Every rank gets the same number of micro-batches, none empty, each of at most token_budget tokens.
    Raises ValueError when there are fewer samples than updates x dp or a sample is longer than the budget.
    """
    plans = []
    for index in range(updates):
        part = samples[index * len(samples) // updates : (index + 1) * len(samples) // updates]
        denominator = sum(sample.response_length for sample in part) if mean_over == "tokens" else len(part)
        tokens, responses = (sum(one) for one in zip(*((s.length, s.response_length) for s in part), strict=True))
        plans.append(Update(_balance(part, dp, token_budget), float(denominator), tokens, responses))
    return plans


def _balance(samples: Sequence[SampleRef], dp: int, token_budget: int) -> tuple[tuple[MicroBatch, ...], ...]:
    if len(samples) < dp:
        raise ValueError(f"{len(samples)} samples cannot give each of {dp} data-parallel ranks a micro-batch")
    longest = max(sample.length for sample in samples)
    if longest > token_budget:
        raise ValueError(f"a sample of {longest} tokens exceeds the micro-batch budget of {token_budget}")
    tokens = sum(sample.length for sample in samples)
    most = len(samples) // dp
    for per_rank in range(min(most, max(1, math.ceil(tokens / (dp * token_budget)))), most + 1):
        bins = _longest_first(samples, dp * per_rank)
        if all(sum(sample.length for sample in one) <= token_budget for one in bins):
            return _deal(bins, dp)
    raise ValueError(f"{len(samples)} samples do not fit {dp} x {most} micro-batches of {token_budget} tokens")


def _longest_first(samples: Sequence[SampleRef], count: int) -> list[list[SampleRef]]:
    """Give each sample, longest first, to the bin with the fewest tokens, the lowest of equals: it is repeatable."""
    bins: list[list[SampleRef]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for sample in sorted(samples, key=lambda one: (-one.length, one.group, one.sample)):
        load, index = heapq.heappop(heap)
        bins[index].append(sample)
        heapq.heappush(heap, (load + sample.length, index))
    return bins


def _deal(bins: list[list[SampleRef]], dp: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Deal bins, fullest first, back and forth over the ranks, so that the ranks' totals come out even."""
    order = sorted(range(len(bins)), key=lambda index: (-sum(one.length for one in bins[index]), index))
    hands: list[list[MicroBatch]] = [[] for _ in range(dp)]
    for turn, index in enumerate(order):
        lap, seat = divmod(turn, dp)
        hands[seat if lap % 2 == 0 else dp - 1 - seat].append(tuple(bins[index]))
    return tuple(tuple(hand) for hand in hands)


def train_sequence(
    group: SampleGroup, ref: SampleRef, mean_over: Literal["tokens", "sequences"]
) -> TrainSequence:
    """Prompt and response of one sample as one training row; only response tokens are learnt from."""
    sample = group.samples[ref.sample]
    prompt_length, length = len(group.prompt.token_ids), len(sample.response_ids_T)

    def on_response(value: np.ndarray | float, dtype: type) -> np.ndarray:
        row_T = np.zeros(prompt_length + length, dtype=dtype)
        row_T[prompt_length:] = value
        return row_T

    return TrainSequence(
        token_ids_T=np.concatenate([np.asarray(group.prompt.token_ids, np.int64), sample.response_ids_T]),
        loss_mask_T=on_response(1.0, np.bool_),
        loss_weight_T=on_response(1.0 if mean_over == "tokens" else 1.0 / length, np.float32),
        advantage_T=on_response(ref.advantage, np.float32),
        engine_logp_T=on_response(sample.engine_logp_T, np.float32),
        experts_TMK=sample.routed_experts,
    )


def train_sequences(
    micro_batches: Sequence[MicroBatch], groups: Mapping[int, SampleGroup], mean_over: Literal["tokens", "sequences"]
) -> list[list[TrainSequence]]:
    """The arrays that a rank's share of an update names."""
    return [[train_sequence(groups[ref.group], ref, mean_over) for ref in batch] for batch in micro_batches]
