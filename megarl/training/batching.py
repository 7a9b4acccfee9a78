"""From samples to micro-batches, alike in work, for every data-parallel rank. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.training.flops import MICRO_BATCH_TOKENS
from megarl.training.shared_prompts import bundlings, total
from megarl.types import Aggregation, FloatArray, IntArray, Sample, SampleGroup
from megarl.types.arrays import TokenArrays


@dataclass(frozen=True)
class SampleRef:
    """One sequence to train on: row `row` of sample `sample` of group `group`; a sample has one row, or several."""

    group: int
    sample: int
    length: int  # of prompt and response, in tokens
    response_length: int
    _: KW_ONLY
    row: int = 0
    num_trained: int | None = None  # of the response's tokens, those that are trained on; None: all
    reward: float = 0.0
    # of the reward in its group (Algorithm.advantage); None where the row has none
    advantage: float | None = None
    is_correct: bool = False
    # the first of the trained tokens, which earlier policies than the step's sampled
    num_stale: int = 0
    # the first tokens, which are those of every row of its group that has any such
    num_shared: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that are trained on."""
        if self.num_trained is None:
            return self.response_length
        return self.num_trained


MicroBatch = tuple[SampleRef, ...]
Key = tuple[int, int, int]  # group, sample and row
_SizeOf = Callable[[MicroBatch], float]
_MORE = 2  # rounds of micro-batches that are tried beyond the fewest
TokenValues = dict[Key, FloatArray]  # of some samples: a number for each token of the response


def key_of(ref: SampleRef) -> Key:
    """A sequence's name in its step."""
    return ref.group, ref.sample, ref.row


def by_sample(refs: Sequence[SampleRef]) -> list[MicroBatch]:
    """The rows of each sample, samples in the order of their first ones."""
    rows_by_sample: dict[tuple[int, int], list[SampleRef]] = {}
    for ref in refs:
        rows_by_sample.setdefault((ref.group, ref.sample), []).append(ref)
    return [tuple(sorted(rows, key=key_of)) for rows in rows_by_sample.values()]


def values_by_reader(
    refs: Sequence[SampleRef],
    arrays: TokenArrays | None,
    readers: Sequence[frozenset[Key]],
) -> list[TokenValues]:
    """For each reader the token values of the responses that it trains on.

    arrays: one per sequence, aligned like the whole sequence; None: this rank does not report any.
    """
    values: TokenValues = {}
    if arrays is not None:
        values = {
            key_of(ref): one_T[-ref.response_length :]
            for ref, one_T in zip(refs, arrays, strict=True)
        }
    return [{key: values[key] for key in values.keys() & reader} for reader in readers]


def spread(response_T: FloatArray, ref: SampleRef) -> FloatArray:
    """The token values of a response, aligned like the whole sequence; 0 on its prompt."""
    return np.pad(response_T, (ref.length - ref.response_length, 0))


@dataclass(frozen=True)
class Update:
    """One optimizer update: micro_batches[dp_rank] are that rank's; the loss sum of all is divided by denominator.

    tokens, loss_tokens and correct_tokens are counted over all ranks: of prompts and responses, those that are trained
    on, and of them those of correct samples. has_turns: whether a sample of any rank has several rows, or tokens that
    the model did not sample.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    denominator: float
    tokens: int
    loss_tokens: int
    correct_tokens: int = 0
    has_turns: bool = False

    def nll_weight(self, coefficient: float) -> float:
        """The weight in the loss sum of a correct sample's tokens, which then add `coefficient` x their mean -log p."""
        if self.correct_tokens:
            return coefficient * self.denominator / self.correct_tokens
        return 0.0


def shuffled(samples: Sequence[SampleRef], seed: int, step: int) -> list[SampleRef]:
    """The sequences of a step with its whole samples in another order: the same one whenever this step is repeated.

    `plan_updates` assigns samples by this order. That of a buffer is by age and so by length, and in that of the data
    the samples of a prompt follow each other.
    """
    whole = by_sample(samples)
    order = np.random.default_rng((seed, step)).permutation(len(whole))
    return [ref for place in order for ref in whole[place]]


def denominator_of(
    aggregation: Aggregation, tokens: int, samples: int, longest_response: int
) -> float:
    """What a loss sum over so many tokens and samples is divided by."""
    denominators = {"token_mean": tokens, "constant": samples * longest_response}
    return float(denominators.get(aggregation, samples))


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
    shares_prompts: bool = False,
) -> list[Update]:
    """Deal samples into `updates` optimizer updates of equal numbers, and balance each over the dp ranks.

    The deal is stratified by trained tokens: of every `updates` samples that are neighbours in length each update gets
    one, in the order given, which should be random (`shuffled`). So updates are alike in tokens, and no length weighs
    less where each loss is divided by its own tokens (`token_mean`). If the numbers do not divide, the samples given
    last, whatever their lengths, go to the first updates.

    Every rank gets the same number of micro-batches, a multiple of `multiple`; some may be empty. It is the fewest that
    fit, or a few more where that is faster: with room left in them they come out more alike, and they keep a pipeline
    busy, but each costs something in itself (flops.MICRO_BATCH_TOKENS). A sequence takes its length of a micro-batch's
    token_budget, rounded up to a multiple of `align`.
    All rows of a sample are in one update and on one rank; and in one micro-batch if the budget has room for them, as
    losses of whole samples need it (GSPO's ratio, for example).
    work: the cost of a sequence by its number of tokens, in which ranks, and the micro-batches that they run together,
    are balanced. bubble_micro_batches: as of TrainLayout. The plan of one update does not depend on the samples' order.
    longest_response: the divisor of the aggregation `constant`.
    shares_prompts: a micro-batch holds and computes a group's prompt once, so that samples of a group go together where
    that is faster; updates have the same samples as without.
    Raises ValueError when there are fewer samples than updates or a sequence is longer than the budget.
    """
    whole = by_sample(samples)
    if len(whole) < updates:
        raise ValueError(f"{len(whole)} samples cannot make {updates} updates")
    tokens_of = partial(total, size=partial(_padded, align=align), shares_prompts=shares_prompts)
    work_of = partial(total, size=work, shares_prompts=shares_prompts)
    plans = []
    for part in _stratified(whole, updates):
        refs = [ref for rows in part for ref in rows]
        tokens = sum(ref.length for ref in refs)
        trained = sum(ref.tokens for ref in refs)
        denominator = denominator_of(aggregation, trained, len(part), longest_response)
        longest = _padded(max(ref.length for ref in refs), align)
        if longest > token_budget:
            raise ValueError(
                f"a sample of {longest} tokens exceeds the micro-batch budget of {token_budget}"
            )
        ways = bundlings(part, tokens_of, token_budget) if shares_prompts else [part]
        all_loads = [_loads(pieces, dp, tokens_of, work_of, token_budget) for pieces in ways]
        shares = _fastest(
            all_loads, dp, multiple, token_budget, bubble_micro_batches, work(MICRO_BATCH_TOKENS)
        )
        correct = sum(ref.tokens for ref in refs if ref.is_correct)
        has_turns = trained < sum(ref.response_length for ref in refs) or len(refs) > len(part)
        plans.append(Update(shares, denominator, tokens, trained, correct, has_turns))
    return plans


def _padded(length: int, align: int) -> int:
    return -(-length // align) * align


def _stratified(whole: Sequence[MicroBatch], updates: int) -> list[list[MicroBatch]]:
    """The samples of each update: one of every `updates` neighbours by trained tokens."""
    num_assigned = len(whole) // updates * updates
    by_tokens = sorted(
        range(num_assigned), key=lambda place: -sum(ref.tokens for ref in whole[place])
    )
    parts: list[list[MicroBatch]] = [[] for _ in range(updates)]
    for first in range(0, num_assigned, updates):
        neighbours = sorted(by_tokens[first : first + updates])
        for part, place in zip(parts, neighbours, strict=True):
            part.append(whole[place])
    for part, sample in zip(parts, whole[num_assigned:], strict=False):
        part.append(sample)
    return parts


def refs_of(updates: Iterable[Update]) -> list[SampleRef]:
    """Every sequence of one rank's share of the updates, in order."""
    return [ref for update in updates for batch in update.micro_batches[0] for ref in batch]


@dataclass(frozen=True)
class _Load:
    """Pieces, longest first, with the tokens [N] that each takes of a row and the work [N] that it is.

    A piece is the rows of a sample that fit one micro-batch together, nearly always its only one, or several samples of
    a group that share their prompt.
    """

    pieces: tuple[MicroBatch, ...]
    tokens: IntArray
    work: npt.NDArray[np.float64]

    @staticmethod
    def of(pieces: Iterable[MicroBatch], tokens_of: _SizeOf, work_of: _SizeOf) -> _Load:
        ordered = tuple(
            sorted(
                pieces, key=lambda piece: (-sum([ref.length for ref in piece]), key_of(piece[0]))
            )
        )
        tokens = np.array([tokens_of(piece) for piece in ordered], np.int64)
        return _Load(ordered, tokens, np.array([work_of(piece) for piece in ordered], np.float64))


def _loads(
    samples: Sequence[MicroBatch], ranks: int, tokens_of: _SizeOf, work_of: _SizeOf, budget: int
) -> list[_Load]:
    """One load, whose pieces go to any rank; or where a sample has several pieces, a load of each rank."""
    whole = _Load.of(samples, tokens_of, work_of)
    if whole.tokens.max() <= budget:
        return [whole]
    assigned = _least_first(whole.tokens, whole.work, np.zeros(ranks), int(whole.tokens.sum()))
    assert assigned is not None, "there is room for everything"
    of_ranks = [
        [piece for place in places for piece in _pieces(whole.pieces[place], tokens_of, budget)]
        for places in assigned
    ]
    return [_Load.of(pieces, tokens_of, work_of) for pieces in of_ranks]


def _pieces(rows: MicroBatch, tokens_of: _SizeOf, budget: int) -> list[MicroBatch]:
    """The rows in their order, as many together as fit."""
    if tokens_of(rows) <= budget:
        return [rows]
    pieces: list[list[SampleRef]] = []
    room = 0
    for ref in rows:
        need = tokens_of((ref,))
        if need > room:
            pieces.append([])
            room = budget
        pieces[-1].append(ref)
        room -= need
    return [tuple(piece) for piece in pieces]


_Bin = list[int]  # places in a _Load
_Hands = tuple[tuple[MicroBatch, ...], ...]  # the micro-batches of each rank


def _fastest(all_loads: Iterable[Sequence[_Load]], *sizes: Any) -> _Hands:
    """The micro-batches with the shortest step, of several ways to make pieces; sizes: as of `_fastest_of`."""
    (_, hands) = min((_fastest_of(loads, *sizes) for loads in all_loads), key=lambda way: way[0])
    return hands


def _fastest_of(
    loads: Sequence[_Load],
    ranks: int,
    multiple: int,
    budget: int,
    bubble_micro_batches: float,
    base: float,
) -> tuple[float, _Hands]:
    """Micro-batches of every rank: of a few numbers of them the one with the shortest step, of equals the fewest.

    Also what the step takes, in units of work.

    loads: as of `_loads`. base: the work that a micro-batch is without any sample.
    """
    sharing = ranks // len(loads)  # ranks that a load is for
    tight = [_best_fit(load.tokens, budget) for load in loads]
    fewest = max(-(-len(bins) // (sharing * multiple)) * multiple for bins in tight)

    def tried(places: int) -> tuple[float, _Hands]:
        filled = (
            _fill(load, bins, places, sharing, budget)
            for load, bins in zip(loads, tight, strict=True)
        )
        assigned = [_assign(bins, load, sharing) for bins, load in zip(filled, loads, strict=True)]
        hands = tuple(hand for hands, _ in assigned for hand in hands)
        slowest = float(np.max([heaviest for _, heaviest in assigned], axis=0).sum())
        # the others pass quickly
        in_use = sum(any(hand[place] for hand in hands) for place in range(places))
        return slowest + places * base + bubble_micro_batches * (slowest / in_use + base), hands

    return min(
        (tried(fewest + more * multiple) for more in range(_MORE + 1)), key=lambda trial: trial[0]
    )


def _fill(load: _Load, tight: list[_Bin], places: int, ranks: int, budget: int) -> list[_Bin]:
    """So many micro-batches on each rank, alike in work if they can be. tight: as best-fit found them."""
    count = places * ranks
    for weights, start in (
        (load.work, _head_start(load.work, count, ranks)),
        (load.tokens, np.zeros(count)),
    ):
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
    targets = []
    left = work.sum() / ranks
    places = count // ranks
    for place in range(places):
        if place * ranks < len(work):
            heaviest = work[place * ranks]
        else:
            heaviest = 0.0
        targets.append(max(heaviest, left / (places - place)))
        left = max(0.0, left - targets[-1])
    return np.repeat(max(targets) - np.array(targets), ranks)


def _least_first(
    tokens: IntArray, weights: npt.NDArray[Any], start: npt.NDArray[np.float64], budget: int
) -> list[_Bin] | None:
    """Each, longest first, into the lightest that has room (Graham, 1969), or None. start: what they weigh empty."""
    bins: list[_Bin] = [[] for _ in start]
    room = np.full(len(start), budget)
    weight = start.copy()
    for place, need in enumerate(tokens):
        index = int(np.where(room >= need, weight, np.inf).argmin())
        if room[index] < need:
            return None
        bins[index].append(place)
        room[index] -= need
        weight[index] += weights[place]
    return bins


def _assign(bins: list[_Bin], load: _Load, dp: int) -> tuple[_Hands, npt.NDArray[np.float64]]:
    """Micro-batches that are next to each other in work, heaviest first, go to the same place in the ranks' lists.

    So ranks that exchange tokens with each other's experts wait least. Of each such set the heaviest goes to the rank
    that has had the least. Also the work of the heaviest of each set.
    """
    weight = np.array([load.work[places].sum() for places in bins])
    order = np.lexsort((np.arange(len(bins)), -weight))
    hands: list[list[MicroBatch]] = [[] for _ in range(dp)]
    totals = np.zeros(dp)
    sets = order.reshape(-1, dp)
    for chosen in sets:
        for rank, index in zip(np.argsort(totals, kind="stable"), chosen, strict=True):
            hands[rank].append(tuple(ref for place in bins[index] for ref in load.pieces[place]))
            totals[rank] += weight[index]
    return tuple(tuple(hand) for hand in hands), weight[sets[:, 0]]


def own_samples(
    updates: Sequence[Update], group_ids: Sequence[int], *groups: SampleGroup
) -> dict[int, SampleGroup]:
    """The groups by their number, without tokens and text of the samples that a rank's share does not name."""
    named = {(ref.group, ref.sample) for ref in refs_of(updates)}
    nothing = Sample((), "", finished=True)

    def own(group_id: int, group: SampleGroup) -> SampleGroup:
        samples = [
            sample if (group_id, at) in named else nothing
            for at, sample in enumerate(group.samples)
        ]
        return replace(group, samples=tuple(samples), given_answers=())

    numbered = zip(group_ids, groups, strict=True)
    return {group_id: own(group_id, group) for group_id, group in numbered}
