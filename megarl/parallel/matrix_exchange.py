"""Whole matrices from the flat shards of a distributed optimizer, each on one of the ranks that hold a part of it.

The ranks of a pipeline stage hold each matrix in parts: tensor-parallel ranks have rows or columns, data-parallel ranks
a range of those. Where tensor parallelism leaves a parameter whole, its ranks have copies, of which one is sent. The
work on the matrices is shared out by their floating point operations, among ranks that hold a part: an expert that one
rank has alone is not sent at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.device import DEVICE
from megarl.parallel import newton_schulz
from megarl.parallel.boxes import boxes

# elements of the matrices that a rank works on at a time, unless one has more
ROUND_ELEMENTS = 64 << 20
_MANY_ROWS = 1 << 40  # more than any parameter has


class MatrixPart(NamedTuple):
    """A rectangle of a matrix [rows, cols], from `at` on, which a parameter of this rank holds from `param_at` on.

    number: of the matrix, in the whole model.
    """

    number: int
    rows: int
    cols: int
    at: tuple[int, int]
    size: tuple[int, int]
    param: str
    param_at: tuple[int, int]


@dataclass(frozen=True)
class OwnPiece:
    """A rectangle of `part` whose elements this rank steps on: in `shard`, from `start` on, as rows of `width`."""

    part: MatrixPart
    shard: Tensor
    start: int
    height: int
    width: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    at: tuple[int, int]

    def of(self, flat: Tensor) -> Tensor:
        """The rectangle as a view of a flat tensor that belongs to the shard."""
        lines = flat[self.start : self.start + self.height * self.width]
        lines = lines.view(self.height, self.width)
        return lines[self.rows[0] : self.rows[1], self.cols[0] : self.cols[1]]


def own_pieces(part: MatrixPart, width: int, shard: Tensor, start: int, end: int) -> list[OwnPiece]:
    """What a shard has of a part. width: columns of the parameter, of which the shard has the elements start to end."""
    first_row, first_col = part.param_at
    pieces = []
    for box in boxes((_MANY_ROWS, width), start, end, end - start):
        row, col = box.offsets
        height, across = box.sizes
        rows = max(row, first_row), min(row + height, first_row + part.size[0])
        cols = max(col, first_col), min(col + across, first_col + part.size[1])
        if rows[0] < rows[1] and cols[0] < cols[1]:
            at = part.at[0] + rows[0] - first_row, part.at[1] + cols[0] - first_col
            inside = (rows[0] - row, rows[1] - row), (cols[0] - col, cols[1] - col)
            pieces.append(OwnPiece(part, shard, box.start - start, height, across, *inside, at))
    return pieces


class _TablePiece(NamedTuple):
    """A row of the table that all ranks of the group have: a piece of rank `rank`, its `index`-th.

    part_row, part_col: where the rank's whole part of the matrix begins. replica: equal on the ranks that share a part.
    """

    number: int
    rows: int
    cols: int
    row: int
    col: int
    height: int
    width: int
    part_row: int
    part_col: int
    replica: int
    rank: int
    index: int

    @property
    def area(self) -> int:
        return self.height * self.width

    def inside(self, matrix: Tensor) -> Tensor:
        return matrix[self.row : self.row + self.height, self.col : self.col + self.width]


@dataclass(frozen=True)
class _ExchangeRound:
    """By rank of the group: the pieces of matrices and of updates that this rank sends (out) and receives (in)."""

    matrices_out: list[list[_TablePiece]]
    matrices_in: list[list[_TablePiece]]
    updates_out: list[list[_TablePiece]]
    updates_in: list[list[_TablePiece]]
    crosses: bool


class MatrixExchange:
    """Gathers the matrices of one distributed optimizer's shards and returns what is made of them; collective.

    replica: the least rank of those among which the optimizer of these pieces is sharded. Every rank of the group makes
    one at the same time.
    """

    def __init__(self, pieces: Sequence[OwnPiece], replica: int, group: dist.ProcessGroup) -> None:
        self._pieces = pieces
        self._group = group
        table = _table(pieces, replica, group)
        senders = _senders(table)
        owners = _owners(senders, group.size())
        rounds = _rounds(senders, owners)
        self._rounds = [
            self._round([each for each in table if rounds[each.number] == number], owners, senders)
            for number in range(1 + max(rounds.values(), default=-1))
        ]

    def _round(
        self, table: Sequence[_TablePiece], owners: Mapping[int, int], senders: set[_TablePiece]
    ) -> _ExchangeRound:
        me = self._group.rank()
        mine: list[list[_TablePiece]] = [[] for _ in range(self._group.size())]
        owned: list[list[_TablePiece]] = [[] for _ in range(self._group.size())]
        for piece in table:
            if piece.rank == me:
                mine[owners[piece.number]].append(piece)
            if owners[piece.number] == me:
                owned[piece.rank].append(piece)
        return _ExchangeRound(
            matrices_out=[[piece for piece in pieces if piece in senders] for pieces in mine],
            matrices_in=[[piece for piece in pieces if piece in senders] for pieces in owned],
            updates_out=owned,
            updates_in=mine,
            crosses=any(piece.rank != owners[piece.number] for piece in table),
        )

    def run(
        self,
        values: Callable[[OwnPiece], Tensor],
        make: Callable[[Tensor], Tensor],
        take: Callable[[OwnPiece, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        """values: of a piece, in any type. make: of equal matrices [n, rows, cols] of `dtype`. take: what was made."""
        for step in self._rounds:
            sent = _joined(
                [
                    values(self._pieces[piece.index])
                    for pieces in step.matrices_out
                    for piece in pieces
                ],
                dtype,
            )
            taken = self._swapped(sent, step.matrices_out, step.matrices_in, crosses=step.crosses)
            made = _made(taken, [piece for pieces in step.matrices_in for piece in pieces], make)
            back = _joined(
                [
                    piece.inside(made[piece.number])
                    for pieces in step.updates_out
                    for piece in pieces
                ],
                dtype,
            )
            got = self._swapped(back, step.updates_out, step.updates_in, crosses=step.crosses)
            own = [piece for pieces in step.updates_in for piece in pieces]
            for piece, flat in zip(own, got.split([piece.area for piece in own]), strict=True):
                take(self._pieces[piece.index], flat.view(piece.height, piece.width))

    def _swapped(
        self,
        sent: Tensor,
        to: Sequence[Sequence[_TablePiece]],
        of: Sequence[Sequence[_TablePiece]],
        *,
        crosses: bool,
    ) -> Tensor:
        if not crosses:
            return sent
        given, taken = ([sum(piece.area for piece in rank) for rank in each] for each in (to, of))
        received = sent.new_empty(sum(taken))
        dist.all_to_all_single(received, sent, taken, given, group=self._group)
        return received


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=dtype, device=DEVICE)
    return torch.cat([tensor.to(dtype).reshape(-1) for tensor in tensors])


def _made(
    values: Tensor, pieces: Sequence[_TablePiece], make: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """By number, what is made of the matrices; equal ones are made together."""
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, rows, cols in dict.fromkeys(piece[:3] for piece in pieces):
        numbers[rows, cols].append(number)
    stacks = {size: values.new_empty(len(same), *size) for size, same in numbers.items()}
    matrices = {
        number: matrix
        for size, same in numbers.items()
        for number, matrix in zip(same, stacks[size], strict=True)
    }
    areas = [piece.area for piece in pieces]
    for piece, flat in zip(pieces, values.split(areas), strict=True):
        piece.inside(matrices[piece.number]).copy_(flat.view(piece.height, piece.width))
    return {
        number: matrix
        for size, same in numbers.items()
        for number, matrix in zip(same, make(stacks.pop(size)), strict=True)
    }


def _table(pieces: Sequence[OwnPiece], replica: int, group: dist.ProcessGroup) -> list[_TablePiece]:
    """The pieces of all ranks of the group, by rank; collective."""
    rows = [
        [
            *piece.part[:3],
            *piece.at,
            piece.rows[1] - piece.rows[0],
            piece.cols[1] - piece.cols[0],
            *piece.part.at,
            replica,
        ]
        for piece in pieces
    ]
    width = len(_TablePiece._fields) - 2
    counts = torch.zeros(group.size(), dtype=torch.int64, device=DEVICE)
    counts[group.rank()] = len(rows)
    dist.all_reduce(counts, group=group)
    longest = int(counts.max())
    own = torch.zeros(longest, width, dtype=torch.int64, device=DEVICE)
    if rows:
        own[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
    everyone = own.new_empty(group.size() * longest, width)
    dist.all_gather_into_tensor(everyone, own, group=group)
    of_ranks = everyone.view(group.size(), longest, width).tolist()
    return [
        _TablePiece._make([*row, rank, index])
        for rank, (table, count) in enumerate(zip(of_ranks, counts.tolist(), strict=True))
        for index, row in enumerate(table[:count])
    ]


def _senders(table: Sequence[_TablePiece]) -> set[_TablePiece]:
    """The pieces of one replica of each part."""
    first: dict[tuple[int, int, int], int] = {}
    for piece in table:
        place = piece.number, piece.part_row, piece.part_col
        first[place] = min(first.get(place, piece.replica), piece.replica)
    return {
        piece
        for piece in table
        if piece.replica == first[piece.number, piece.part_row, piece.part_col]
    }


def _owners(senders: set[_TablePiece], num_ranks: int) -> dict[int, int]:
    """By matrix, the rank that works on it: of those that send a part, the one with the least work so far."""
    holders: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for piece in senders:
        holders[piece[:3]].add(piece.rank)
    work = [0] * num_ranks
    owners = {}
    for cost, (number, _, _), ranks in sorted(
        (-newton_schulz.flops(*matrix[1:]), matrix, sorted(ranks))
        for matrix, ranks in holders.items()
    ):
        owner = min(ranks, key=work.__getitem__)
        work[owner] -= cost
        owners[number] = owner
    return owners


def _rounds(senders: set[_TablePiece], owners: Mapping[int, int]) -> dict[int, int]:
    """By matrix, the round in which its owner works on it, with at most ROUND_ELEMENTS or one matrix in each."""
    held: dict[int, int] = defaultdict(int)
    current: dict[int, int] = defaultdict(int)
    rounds = {}
    for number, rows, cols in sorted({piece[:3] for piece in senders}):
        owner = owners[number]
        area = math.prod((rows, cols))
        if held[owner] and held[owner] + area > ROUND_ELEMENTS:
            current[owner] += 1
            held[owner] = 0
        held[owner] += area
        rounds[number] = current[owner]
    return rounds
