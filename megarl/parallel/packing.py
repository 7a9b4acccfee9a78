"""Variable-length sequences <-> one packed row of T tokens (Megatron's THD layout). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algos.targets import Targets
from megarl.parallel.prefixes import PrefixBranch
from megarl.types import FloatArray, IntArray, TrainSequence, sample_numbers
from megarl.types.arrays import TokenArrays

LENGTH_STEP = 1024


@dataclass(frozen=True)
class Split:
    """How a row is split: cp ranks share out each sequence's tokens, tp ranks each such share. Here is cp_rank."""

    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    align: int = 1  # every sequence's length is padded to a multiple of this
    rows: int = 1  # the tokens of each tp rank are padded to a multiple of this

    @property
    def multiple(self) -> int:
        """Tokens that the whole row is padded to a multiple of."""
        if self.cp > 1:
            return self.cp * math.lcm(2, self.tp * self.rows)
        return self.tp * self.rows


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Where the L tokens of a row that holds shared prefixes once (prefixes.py), padding included, are in S sequences.

    position_L: in its sequences; parent_L: the place of the token before it, or its own. place_T: of the sequences'
    tokens, end to end, their places; next_T: the same of the token after each, and the last's own. has_branch_SB
    [S + 1, B + 1]: 1 where a sequence has a branch, else 0, as for padding. branches: of the tokens without padding.
    """

    position_L: Tensor
    parent_L: Tensor
    place_T: Tensor
    next_T: Tensor
    has_branch_SB: Tensor
    branches: tuple[PrefixBranch, ...]


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch: T tokens, of which this rank of the `cp` that split it holds the L = T / cp at `places`.

    token_ids_L, labels_L: int64; sequence_L: int64, the sequence of each token, len(lengths) for padding. bounds: int32
    [segments + 1], where each segment of the row starts; starts and lengths: the sequences themselves, without padding.
    order_T: where the ranks' shares, one behind the other, hold the row's tokens.

    lengths_S: float32, the length of every sequence, and 1 for the padding. max_length: an upper bound of the longest
    segment, padding included. Both are made with the row: reading them from the device would hold up the host.

    shared: of a row that holds prefixes once, L tokens of a tree for the T of the sequences, which are more. Then
    token_ids_L, labels_L, places and order_T describe the tree's tokens, with the padding behind them, and sequence_L
    has the branch of each. bounds is one segment, of all L tokens, and max_length an upper bound of their positions.
    starts, lengths, lengths_S, targets and old_logp_T describe the sequences, end to end and without padding.
    """

    cp: int
    token_ids_L: Tensor
    labels_L: Tensor
    sequence_L: Tensor
    bounds: Tensor
    order_T: Tensor
    places: IntArray
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    lengths_S: Tensor
    max_length: int
    targets: Targets
    old_logp_T: Tensor | None
    # of each token in each layer M with experts: K of them, -1 if not known
    experts_LMK: Tensor | None = None
    shared: SharedPrefixes | None = None


def zigzag(bounds: IntArray, cp: int, rank: int) -> IntArray:
    """The places of a row that a context-parallel rank holds: chunks `rank` and `2 cp - 1 - rank` of each segment.

    Early tokens attend to few and late ones to many, so that every rank has as much to do (Llama 3, section 3.3.2).
    """
    if cp == 1:
        return np.arange(bounds[-1])
    places = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunks = np.arange(start, end).reshape(2 * cp, -1)
        places += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return np.concatenate(places)


@dataclass(frozen=True)
class RankOrder:
    """How the shares of context-parallel ranks, one behind the other, hold the T tokens of a row.

    order_T: where they hold the row's tokens; places_T: the places in the row of what they hold.
    """

    order_T: Tensor
    places_T: Tensor


def rank_order(bounds: Tensor, length: int, cp: int) -> RankOrder:
    """As `zigzag` splits a row of `length` tokens; bounds: of its segments, which stay on their device."""
    place_T, segment_T = _segments_of(bounds, length)
    start_T = bounds[segment_T].long()
    chunk_T = (bounds[segment_T + 1] - start_T) // (2 * cp)
    inside_T = place_T - start_T
    number_T = inside_T // chunk_T
    is_late = number_T >= cp
    rank_T = torch.where(is_late, 2 * cp - 1 - number_T, number_T)
    own_T = start_T // cp + is_late * chunk_T + inside_T % chunk_T
    order_T = rank_T * (len(place_T) // cp) + own_T
    return RankOrder(order_T, torch.argsort(order_T))


def position_in_segment(bounds: Tensor, length: int) -> Tensor:
    """[T]: how many tokens of its segment are before each token of a row of `length` tokens."""
    place_T, segment_T = _segments_of(bounds, length)
    return place_T - bounds[segment_T]


def _segments_of(bounds: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[T] of each: the places of a row, and the segment of each."""
    place_T = torch.arange(length, device=bounds.device)
    return place_T, torch.searchsorted(bounds[1:].long(), place_T, right=True)


def pack(
    sequences: Sequence[TrainSequence],
    old_logp: TokenArrays | None = None,
    reference_logp: TokenArrays | None = None,
    returns: TokenArrays | None = None,
    old_values: TokenArrays | None = None,
    *,
    split: Split,
    device: str,
) -> PackedRow:
    """Lay sequences end to end, each padded to split.align and the row to split.multiple; no sequences: padding alone.

    old_logp and what follows hold one array per sequence, aligned like the sequence's own arrays.
    """
    lengths = tuple(len(sequence.token_ids_T) for sequence in sequences)
    bounds = _bounds(lengths, split)
    starts = tuple(bounds[: len(lengths)].tolist())
    length = int(bounds[-1])
    shares = [zigzag(bounds, split.cp, rank) for rank in range(split.cp)]
    places = shares[split.cp_rank]

    row = _RowLayout(sequences, starts, length, device)
    token_ids_T = np.zeros(length, np.int64)
    sequence_T = np.full(length, len(lengths), np.int64)
    for index, (start, sequence) in enumerate(zip(starts, sequences, strict=True)):
        token_ids_T[start : start + lengths[index]] = sequence.token_ids_T
        sequence_T[start : start + lengths[index]] = index
    experts_TMK = _experts(sequences, starts, length)
    targets = Targets(
        loss_mask_T=row.field("loss_mask_T", np.bool_),
        is_stale_T=row.field("is_stale_T", np.bool_),
        loss_weight_T=row.field("loss_weight_T"),
        advantage_T=row.field("advantage_T"),
        outcome_T=row.field("outcome"),
        engine_logp_T=row.field("engine_logp_T"),
        nll_weight_T=row.field("nll_weight_T"),
        sequence_T=row.on_device(_samples(sequences)[sequence_T]),
        dropped_T=row.field_of_some("dropped_T", np.bool_),
        turn_T=row.field_of_some("turn_T", np.int64),
        reference_logp_T=row.floats(reference_logp),
        return_T=row.floats(returns),
        old_value_T=row.floats(old_values),
    )
    return PackedRow(
        cp=split.cp,
        token_ids_L=row.on_device(token_ids_T[places]),
        labels_L=row.field("token_ids_T", np.int64)[row.on_device(places)],
        sequence_L=row.on_device(sequence_T[places]),
        bounds=row.on_device(bounds.astype(np.int32)),
        order_T=row.on_device(np.argsort(np.concatenate(shares))),
        places=places,
        starts=starts,
        lengths=lengths,
        lengths_S=row.on_device(np.array([*lengths, 1], np.float32)),
        max_length=rounded_length(int(np.diff(bounds).max())),
        targets=targets,
        old_logp_T=row.floats(old_logp),
        experts_LMK=None if experts_TMK is None else row.on_device(experts_TMK[places]),
    )


def _samples(sequences: Sequence[TrainSequence]) -> IntArray:
    """[sequences + 1]: for each the first sequence of its sample, for the padding itself."""
    _, first, numbers = np.unique(sample_numbers(sequences), return_index=True, return_inverse=True)
    return np.append(first[numbers], len(sequences))


@dataclass(frozen=True)
class _RowLayout:
    """Makes the tensors [length] of a row in which the sequences begin at `starts`."""

    sequences: Sequence[TrainSequence]
    starts: tuple[int, ...]
    length: int
    device: str

    def on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def floats(self, arrays: TokenArrays | None) -> Tensor | None:
        """One array for each sequence, aligned with the logprobs."""
        return None if arrays is None else self._aligned(arrays, np.float32)

    def field(self, name: str, dtype: type = np.float32) -> Tensor:
        """A field of the sequences' tokens, or of a whole sequence at each of its tokens; 0 where it is None."""
        return self._aligned([_per_token(each, name, dtype) for each in self.sequences], dtype)

    def field_of_some(self, name: str, dtype: type) -> Tensor | None:
        """None where no sequence has the field."""
        if all(getattr(sequence, name) is None for sequence in self.sequences):
            return None
        return self.field(name, dtype)

    def _aligned(self, arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
        """[T], in which what is about a token stands before it, where it is predicted."""
        values_T = np.zeros(self.length, dtype)
        for start, values in zip(self.starts, arrays, strict=True):
            values_T[start : start + len(values) - 1] = values[1:]
        return self.on_device(values_T)


def _per_token(sequence: TrainSequence, name: str, dtype: type) -> np.ndarray:
    value = getattr(sequence, name)
    if isinstance(value, np.ndarray):
        return value
    return np.full(len(sequence.token_ids_T), value or 0, dtype)


def rounded_length(length: int) -> int:
    """The next multiple of LENGTH_STEP: attention kernels are planned anew for each value that they are given."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _bounds(lengths: Sequence[int], split: Split) -> IntArray:
    """Where each segment of a row starts, and its end: sequences with their padding, then the row's own."""
    segments = [-(-length // split.align) * split.align for length in lengths]
    padding = -sum(segments) % split.multiple or (0 if segments else split.multiple)
    return np.concatenate([[0], np.cumsum(segments + ([padding] if padding else []))])


def _experts(
    sequences: Sequence[TrainSequence], starts: Sequence[int], num_tokens: int
) -> np.ndarray | None:
    """The engine's choices, where every sequence brings them; its last token was never an input of the engine's."""
    known = [sequence.experts_TMK for sequence in sequences if sequence.experts_TMK is not None]
    if not known or len(known) < len(sequences):
        return None
    experts_TMK = np.full((num_tokens, *known[0].shape[1:]), -1, np.int64)
    for start, experts in zip(starts, known, strict=True):
        experts_TMK[start : start + len(experts)] = experts
    return experts_TMK


def unpack(row: PackedRow, values_T: Tensor) -> list[FloatArray]:
    """Per-position values -> one float32 array per sequence, aligned to the token each is about; the first is 0."""
    flat_T = values_T.detach().float().cpu().numpy()
    arrays = []
    for start, length in zip(row.starts, row.lengths, strict=True):
        own_T = np.zeros(length, dtype=np.float32)
        own_T[1:] = flat_T[start : start + length - 1]
        arrays.append(own_T)
    return arrays
