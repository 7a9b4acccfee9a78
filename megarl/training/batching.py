"""From samples to micro-batches, alike in work, for every data-parallel rank. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.training.flops import MICRO_BATCH_TOKENS
from megarl.types import Aggregation, FloatArray, IntArray, Sample, SampleGroup, TrainSequence


@dataclass(frozen=True)
class SampleRef:
    """One sample to train on: sample `sample` of group `group`."""

    group: int
    sample: int
    length: int  # of prompt and response, in tokens
    response_length: int
    _: KW_ONLY
    reward: float = 0.0
    advantage: float | None = None  # of the reward in its group (Algorithm.advantage); None where the row has none
    is_correct: bool = False
    num_stale: int = 0  # the response's first tokens, which earlier policies than the step's sampled


MicroBatch = tuple[SampleRef, ...]
Key = tuple[int, int]  # group and sample
_MORE = 2  # rounds of micro-batches that are tried beyond the fewest
TokenValues = dict[Key, FloatArray]  # of some samples: a number for each token of the response


def key_of(ref: SampleRef) -> Key:
    """A sample's name in its step."""
    return ref.group, ref.sample


def values_by_reader(
    refs: Sequence[SampleRef], arrays: Sequence[FloatArray] | None, readers: Sequence[frozenset[Key]]
) -> tuple[TokenValues, ...]:
    """For each reader the token values of the responses that it trains on.

    arrays: one per sample, aligned like the whole sequence; None: this rank does not report any.
    """
    found: TokenValues = {}
    if arrays is not None:
        found = {key_of(ref): one_T[-ref.response_length :] for ref, one_T in zip(refs, arrays, strict=True)}
    return tuple({key: found[key] for key in found.keys() & reader} for reader in readers)


def spread(response_T: FloatArray, ref: SampleRef) -> FloatArray:
    """The token values of a response, aligned like the whole sequence; 0 on its prompt."""
    return np.pad(response_T, (ref.length - ref.response_length, 0))


@dataclass(frozen=True)
class Update:
    """One optimizer update: micro_batches[dp_rank] are that rank's; the loss sum of all is divided by denominator.

    tokens, loss_tokens and correct_tokens are counted over all ranks: of prompts and responses, of responses alone, and
    of correct ones.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    denominator: float
    tokens: int
    loss_tokens: int
    correct_tokens: int = 0

    def nll_weight(self, coefficient: float) -> float:
        """The weight in the loss sum of a correct sample's tokens, which then add `coefficient` x their mean -log p."""
        return coefficient * self.denominator / self.correct_tokens if self.correct_tokens else 0.0


def plan_updates(
    samples: Sequence[SampleRef],
    *,
    updates: int,
    dp: int,
    token_budget: int,
    aggregation: Aggregation,
    longest_response: int = 0,
    work: Callable[[int], float],
    align: int = 1,
    multiple: int = 1,
    bubble_micro_batches: float = 0.0,
) -> list[Update]:
    """Split samples, in order, into `updates` equal optimizer updates and balance each over the dp ranks.

    Every rank gets the same number of micro-batches, a multiple of `multiple`; some may be empty. It is the fewest that
    fit, or a few more where that is faster: with room left in them they come out more alike, and they keep a pipeline
    busy, but each costs something in itself (flops.MICRO_BATCH_TOKENS). A sequence takes its length of a micro-batch's
    token_budget, rounded up to a multiple of `align`.
    work: the cost of a sequence by its number of tokens, in which ranks, and the micro-batches that they run together,
    are balanced. bubble_micro_batches: as of TrainLayout. The plan does not depend on the samples' order within an
    update.
    longest_response: the divisor of the aggregation `constant`.
    Raises ValueError when there are fewer samples than updates or a sample is longer than the budget.
    """
    if len(samples) < updates:
        raise ValueError(f"{len(samples)} samples cannot make {updates} updates")
    plans = []
    for index in range(updates):
        part = samples[index * len(samples) // updates : (index + 1) * len(samples) // updates]
        tokens, responses = sum(one.length for one in part), sum(one.response_length for one in part)
        denominators = {"token_mean": responses, "constant": len(part) * longest_response}
        denominator = denominators.get(aggregation, len(part))
        load = _Load.of(part, work, align)
        if load.tokens[0] > token_budget:
            raise ValueError(f"a sample of {load.tokens[0]} tokens exceeds the micro-batch budget of {token_budget}")
        shares = _fastest(load, dp, multiple, token_budget, bubble_micro_batches, work(MICRO_BATCH_TOKENS))
        correct = sum(one.response_length for one in part if one.is_correct)
        plans.append(Update(shares, float(denominator), tokens, responses, correct))
    return plans


def refs_of(updates: Iterable[Update]) -> list[SampleRef]:
    """Every sample of one rank's share of the updates, in order."""
    return [ref for update in updates for batch in update.micro_batches[0] for ref in batch]


@dataclass(frozen=True)
class _Load:
    """Samples, longest first, with the tokens [N] that each takes of a row and the work [N] that it is."""

    samples: tuple[SampleRef, ...]
    tokens: IntArray
    work: npt.NDArray[np.float64]

    @staticmethod
    def of(samples: Sequence[SampleRef], work: Callable[[int], float], align: int) -> _Load:
        ordered = tuple(sorted(samples, key=lambda one: (-one.length, one.group, one.sample)))
        lengths, places = np.unique([one.length for one in ordered], return_inverse=True)
        works = np.array([work(int(length)) for length in lengths])
        return _Load(ordered, (-(-lengths // align) * align)[places], works[places])


_Bin = list[int]  # places in a _Load


def _fastest(
    load: _Load, ranks: int, multiple: int, budget: int, bubble_micro_batches: float, own: float
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches of every rank: of a few numbers of them the one with the shortest step, of equals the fewest.

    own: the work that a micro-batch is without any sample.
    """
    tight = _best_fit(load.tokens, budget)
    fewest = -(-len(tight) // (ranks * multiple)) * multiple

    def tried(places: int) -> tuple[float, tuple[tuple[MicroBatch, ...], ...]]:
        hands, slowest = _deal(_fill(load, tight, places, ranks, budget), load, ranks)
        in_use = sum(any(hand[place] for hand in hands) for place in range(places))  # the others pass quickly
        return slowest + places * own + bubble_micro_batches * (slowest / in_use + own), hands

    _, hands = min((tried(fewest + more * multiple) for more in range(_MORE + 1)), key=lambda one: one[0])
    return hands


def _fill(load: _Load, tight: list[_Bin], places: int, ranks: int, budget: int) -> list[_Bin]:
    """So many micro-batches on each rank, alike in work if they can be. tight: as best-fit found them."""
    count = places * ranks
    for weights, start in ((load.work, _head_start(load.work, count, ranks)), (load.tokens, np.zeros(count))):
        bins = _least_first(load.tokens, weights, start, budget)
        if bins is not None:
            return bins
    return tight + [[] for _ in range(count - len(tight))]


def _best_fit(tokens: IntArray, budget: int) -> list[_Bin]:
    """Each, longest first, where it leaves the least room, or into a new one (Johnson, 1973: up to 11/9 of fewest)."""
    bins: list[_Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, place in bins), ascending
    for place, need in enumerate(tokens.tolist()):
        at = bisect.bisect_left(room, (need, -1))
        left, index = room.pop(at) if at < len(room) else (budget, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(place)
        bisect.insort(room, (left - need, index))
    return bins


def _head_start(work: npt.NDArray[np.float64], count: int, ranks: int) -> npt.NDArray[np.float64]:
    """Work [count] that micro-batches are taken to have already, so that they come out alike at each place.

    A sample that is more work than the mean of micro-batches is waited for by the other ranks: theirs at its place may
    be as heavy, and all others then lighter.
    """
    targets, left, places = [], work.sum() / ranks, count // ranks
    for place in range(places):
        heaviest = work[place * ranks] if place * ranks < len(work) else 0.0
        targets.append(max(heaviest, left / (places - place)))
        left = max(0.0, left - targets[-1])
    return np.repeat(max(targets) - np.array(targets), ranks)


def _least_first(
    tokens: IntArray, weights: npt.NDArray[Any], start: npt.NDArray[np.float64], budget: int
) -> list[_Bin] | None:
    """Each, longest first, into the lightest that has room (Graham, 1969), or None. start: what they weigh empty."""
    bins: list[_Bin] = [[] for _ in start]
    room, weight = np.full(len(start), budget), start.copy()
    for place, need in enumerate(tokens):
        index = int(np.where(room >= need, weight, np.inf).argmin())
        if room[index] < need:
            return None
        bins[index].append(place)
        room[index] -= need
        weight[index] += weights[place]
    return bins


def _deal(bins: list[_Bin], load: _Load, dp: int) -> tuple[tuple[tuple[MicroBatch, ...], ...], float]:
    """Micro-batches that are next to each other in work, heaviest first, go to the same place in the ranks' lists.

    So ranks that exchange tokens with each other's experts wait least. Of each such set the heaviest goes to the rank
    that has had the least. Also the work of the heaviest of each set, summed.
    """
    weight = np.array([load.work[one].sum() for one in bins])
    order = np.lexsort((np.arange(len(bins)), -weight))
    hands: list[list[MicroBatch]] = [[] for _ in range(dp)]
    totals = np.zeros(dp)
    sets = order.reshape(-1, dp)
    for chosen in sets:
        for rank, index in zip(np.argsort(totals, kind="stable"), chosen, strict=True):
            hands[rank].append(tuple(load.samples[place] for place in bins[index]))
            totals[rank] += weight[index]
    return tuple(tuple(hand) for hand in hands), float(weight[sets[:, 0]].sum())


def own_samples(
    updates: Sequence[Update], group_ids: Sequence[int], *groups: SampleGroup
) -> tuple[Sequence[int], *tuple[SampleGroup, ...]]:
    """The ids and the groups, these without tokens and text of the samples that a rank's share does not name."""
    named = {key_of(ref) for ref in refs_of(updates)}
    nothing = Sample(np.zeros(0, np.int64), np.zeros(0, np.float32), "", finished=True, parts=())

    def own(group_id: int, group: SampleGroup) -> SampleGroup:
        samples = [one if (group_id, at) in named else nothing for at, one in enumerate(group.samples)]
        return replace(group, samples=tuple(samples), given_answers=())

    return group_ids, *(own(*pair) for pair in zip(group_ids, groups, strict=True))


def train_sequence(
    group: SampleGroup, ref: SampleRef, aggregation: Aggregation, nll_weight: float = 0.0
) -> TrainSequence:
    """Prompt and response of one sample as one training sequence; only response tokens are trained on.

    nll_weight: of the tokens' -log p in the loss sum, where the sample is correct. The reward is the ref's: the group's
    own is from before the reward model and the overlong penalty.
    """
    sample = group.samples[ref.sample]
    prompt_length, length = len(group.prompt.token_ids), len(sample.response_ids_T)

    def on_response(value: np.ndarray | float, dtype: type) -> np.ndarray:
        row_T = np.zeros(prompt_length + length, dtype=dtype)
        row_T[prompt_length:] = value
        return row_T

    return TrainSequence(
        token_ids_T=np.concatenate([np.asarray(group.prompt.token_ids, np.int64), sample.response_ids_T]),
        loss_mask_T=on_response(1.0, np.bool_),
        loss_weight_T=on_response(1.0 / length if aggregation == "sequence_mean" else 1.0, np.float32),
        engine_logp_T=on_response(sample.engine_logp_T, np.float32),
        reward=ref.reward,
        outcome=float(ref.is_correct),
        nll_weight_T=on_response(nll_weight, np.float32) if nll_weight and ref.is_correct else None,
        is_stale_T=on_response(np.arange(length) < ref.num_stale, np.bool_) if ref.num_stale else None,
        experts_TMK=sample.routed_experts,
    )


def train_sequences(
    micro_batches: Sequence[MicroBatch],
    groups: Mapping[int, SampleGroup],
    aggregation: Aggregation,
    nll_weight: float = 0.0,
) -> list[list[TrainSequence]]:
    """The arrays that a rank's share of an update names."""
    return [
        [train_sequence(groups[ref.group], ref, aggregation, nll_weight) for ref in batch] for batch in micro_batches
    ]
