"""From samples to micro-batches, alike in work, for every data-parallel rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from megarl.placement.train_layout import fewest_ranks
from megarl.training.bins import Bin, Load, best_fit, fill, least_first, placed, sets
from megarl.training.flops import MICRO_BATCH_TOKENS
from megarl.training.shared_prompts import BatchPiece, bundlings, piece_of
from megarl.types import Aggregation, FloatArray, Sample, SampleGroup
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
    # of a planned sequence, the data-parallel ranks that have its row and split it among them
    cp: int = 1

    @property
    def tokens(self) -> int:
        """The tokens that are trained on."""
        if self.num_trained is None:
            return self.response_length
        return self.num_trained


MicroBatch = tuple[SampleRef, ...]
_Hands = tuple[tuple[MicroBatch, ...], ...]  # the micro-batches of each rank
_Piece = BatchPiece[SampleRef]
Key = tuple[int, int, int]  # group, sample and row
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
    dp_rank: int,
) -> list[TokenValues]:
    """For each reader the token values of the responses that it trains on.

    arrays: one per sequence, aligned like the whole sequence; None: this rank does not report any. dp_rank: of this
    rank; of those that have a sequence the first reports it.
    """
    values: TokenValues = {}
    if arrays is not None:
        values = {
            key_of(ref): one_T[-ref.response_length :]
            for ref, one_T in zip(refs, arrays, strict=True)
            if dp_rank % ref.cp == 0
        }
    return [{key: values[key] for key in values.keys() & reader} for reader in readers]


def spread(response_T: FloatArray, ref: SampleRef) -> FloatArray:
    """The token values of a response, aligned like the whole sequence; 0 on its prompt."""
    return np.pad(response_T, (ref.length - ref.response_length, 0))


@dataclass(frozen=True)
class Update:
    """One optimizer update: micro_batches[dp_rank] are that rank's; the loss sum of all is divided by denominator.

    Ranks that split a row among them (`SampleRef.cp`) follow each other, and each of them has it at the same place.
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

    @property
    def samples(self) -> list[SampleRef]:
        """Every sequence of all ranks, once even where several have it."""
        refs = {key_of(ref): ref for rank in self.micro_batches for batch in rank for ref in batch}
        return list(refs.values())

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
    max_cp: int = 1,
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
    token_budget, rounded up to a multiple of `align`. A longer one is split over 2, 4, ... up to max_cp ranks, whose
    row has room for so many budgets, and is filled up with shorter ones.
    All rows of a sample are in one update and on one rank; and in one micro-batch if the budget has room for them, as
    losses of whole samples need it (GSPO's ratio, for example).
    work: the cost of a sequence by its number of tokens, in which ranks, and the micro-batches that they run together,
    are balanced. bubble_micro_batches, max_cp: as of TrainLayout. The plan of one update does not depend on the
    samples' order. longest_response: the divisor of the aggregation `constant`.
    shares_prompts: a micro-batch holds and computes a group's prompt once, so that samples of a group go together where
    that is faster; updates have the same samples as without.
    Raises ValueError when there are fewer samples than updates, or a sequence does not fit max_cp budgets.
    """
    whole = by_sample(samples)
    if len(whole) < updates:
        raise ValueError(f"{len(whole)} samples cannot make {updates} updates")
    plans = []
    for part in _stratified(whole, updates):
        micro_batches = _micro_batches(
            part,
            dp=dp,
            token_budget=token_budget,
            work=work,
            align=align,
            multiple=multiple,
            bubble_micro_batches=bubble_micro_batches,
            max_cp=max_cp,
            shares_prompts=shares_prompts,
        )
        plans.append(_update(part, micro_batches, aggregation, longest_response))
    return plans


def _update(
    part: Sequence[MicroBatch],
    micro_batches: _Hands,
    aggregation: Aggregation,
    longest_response: int,
) -> Update:
    """The update of these samples, each with its rows, with their micro-batches on every rank."""
    refs = [ref for rows in part for ref in rows]
    trained = sum(ref.tokens for ref in refs)
    return Update(
        micro_batches,
        denominator_of(aggregation, trained, len(part), longest_response),
        tokens=sum(ref.length for ref in refs),
        loss_tokens=trained,
        correct_tokens=sum(ref.tokens for ref in refs if ref.is_correct),
        has_turns=trained < sum(ref.response_length for ref in refs) or len(refs) > len(part),
    )


def _micro_batches(
    part: Sequence[MicroBatch],
    *,
    dp: int,
    token_budget: int,
    work: Callable[[int], float],
    align: int,
    multiple: int,
    bubble_micro_batches: float,
    max_cp: int,
    shares_prompts: bool,
) -> _Hands:
    """The micro-batches of each rank for the samples of one update; arguments and errors as of `plan_updates`."""
    longest = max(_padded(ref.length, align) for rows in part for ref in rows)
    if longest > max_cp * token_budget:
        ranks = f" of {max_cp} ranks" if max_cp > 1 else ""
        raise ValueError(
            f"a sample of {longest} tokens exceeds the micro-batch budget of {max_cp * token_budget}{ranks}"
        )

    def sized(rows: MicroBatch) -> _Piece:
        tokens = partial(_padded, align=align)
        return piece_of(rows, tokens=tokens, work=work, shares_prompts=shares_prompts)

    samples = [sized(rows) for rows in part]
    # all ranks of a sample need all of its rows, so that rows in several micro-batches fix which ranks these are
    width = max_cp if max(sample.tokens for sample in samples) > max_cp * token_budget else 1
    budget = width * token_budget
    ways = bundlings(samples, token_budget) if shares_prompts else [samples]
    timed = [
        _fastest(
            _loads(
                _Load.of(pieces, budget),
                ranks=dp // width,
                sized=sized,
                budget=budget,
                max_cp=max_cp // width,
            ),
            ranks=dp // width,
            multiple=multiple,
            budget=budget,
            bubble_micro_batches=bubble_micro_batches,
            base=width * work(MICRO_BATCH_TOKENS),
        )
        for pieces in ways
    ]
    _, hands = min(timed, key=lambda way: way[0])
    return tuple(_split_over(width, hand) for hand in hands for _ in range(width))


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


def _split_over(ranks: int, micro_batches: Iterable[MicroBatch]) -> tuple[MicroBatch, ...]:
    """The micro-batches as each of so many ranks has them."""
    if ranks == 1:
        return tuple(micro_batches)
    return tuple(tuple(replace(ref, cp=ranks) for ref in batch) for batch in micro_batches)


@dataclass(frozen=True)
class _Load(Load):
    """Pieces, most padded tokens first: the rows of a sample that fit one micro-batch, nearly always its only one.

    Or several samples of a group, whose prompt counts once.
    """

    pieces: tuple[_Piece, ...]

    @staticmethod
    def of(pieces: Iterable[_Piece], budget: int) -> _Load:
        # padded, because a piece of many short rows may need more ranks than a longer piece of a single row
        ordered = sorted(pieces, key=lambda piece: (-piece.tokens, key_of(piece.refs[0])))
        ranks = [fewest_ranks(piece.tokens, budget) for piece in ordered]
        return _Load(
            tokens=np.array([piece.tokens for piece in ordered], np.int64),
            work=np.array([piece.work for piece in ordered], np.float64),
            ranks=np.array(ranks, np.int64),
            pieces=tuple(ordered),
        )


def _loads(
    whole: _Load,
    *,
    ranks: int,
    sized: Callable[[MicroBatch], _Piece],
    budget: int,
    max_cp: int,
) -> list[_Load]:
    """One load, whose pieces go to any rank; or where a sample has several pieces, a load of each rank."""
    if whole.tokens.max() <= max_cp * budget:
        return [whole]
    assigned = least_first(whole, whole.work, np.zeros(ranks), np.full(ranks, whole.tokens.sum()))
    assert assigned is not None, "there is room for everything"
    of_ranks = [
        [piece for place in places for piece in _pieces(whole.pieces[place], sized, budget)]
        for places in assigned
    ]
    return [_Load.of(pieces, budget) for pieces in of_ranks]


def _pieces(sample: _Piece, sized: Callable[[MicroBatch], _Piece], budget: int) -> list[_Piece]:
    """The rows of a sample in their order, as many together as fit."""
    if sample.tokens <= budget:
        return [sample]
    together: list[list[SampleRef]] = []
    room = 0
    for ref in sample.refs:
        need = sized((ref,)).tokens
        if need > room:
            together.append([])
            room = budget
        together[-1].append(ref)
        room -= need
    return [sized(tuple(rows)) for rows in together]


def _fastest(
    loads: Sequence[_Load],
    *,
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
    tight = [best_fit(load, budget) for load in loads]
    taken = [int(load.sizes(bins).sum()) for load, bins in zip(loads, tight, strict=True)]
    fewest = max(-(-size // (sharing * multiple)) * multiple for size in taken)

    def tried(places: int) -> tuple[float, _Hands]:
        filled = (
            fill(load, bins, places, sharing, budget)
            for load, bins in zip(loads, tight, strict=True)
        )
        assigned = [_assign(bins, load, sharing) for bins, load in zip(filled, loads, strict=True)]
        hands = tuple(hand for hands, _ in assigned for hand in hands)
        assert {len(hand) for hand in hands} == {places}, "ranks would wait for each other forever"
        slowest = float(np.max([heaviest for _, heaviest in assigned], axis=0).sum())
        # the others pass quickly
        in_use = sum(any(hand[place] for hand in hands) for place in range(places))
        return slowest + places * base + bubble_micro_batches * (slowest / in_use + base), hands

    return min(
        (tried(fewest + more * multiple) for more in range(_MORE + 1)), key=lambda trial: trial[0]
    )


def _assign(bins: list[Bin], load: _Load, dp: int) -> tuple[_Hands, npt.NDArray[np.float64]]:
    """Micro-batches that are next to each other in work, heaviest first, go to the same place in the ranks' lists.

    So ranks that exchange tokens with each other's experts wait least. Of each such set the heaviest goes to the rank
    that has had the least. Also the work of a rank with the heaviest of each set.
    """
    sizes = load.sizes(bins)
    weight = np.array([load.work[places].sum() for places in bins]) / sizes
    order = np.lexsort((np.arange(len(bins)), -weight)).tolist()
    hands: list[list[MicroBatch]] = [[] for _ in range(dp)]
    totals = np.zeros(dp)
    chosen_sets = sets(order, sizes, dp)
    for chosen in chosen_sets:
        for first, index in placed(chosen, sizes, totals):
            size = int(sizes[index])
            refs = tuple(ref for place in bins[index] for ref in load.pieces[place].refs)
            (row,) = _split_over(size, [refs])
            for rank in range(first, first + size):
                hands[rank].append(row)
            totals[first : first + size] += weight[index]
    return tuple(tuple(hand) for hand in hands), weight[[chosen[0] for chosen in chosen_sets]]


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
