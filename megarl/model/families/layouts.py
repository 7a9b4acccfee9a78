"""How a side lays out the checkpoint's tensors in its parameters: cut, stack, weave, copy, spread. Declarations alone.

cut: rows or columns over ranks, evenly. weave: for each of some groups the group's share of the first piece, then that
of the second. copy: whole on every rank. spread: whole units over ranks; neighbours hold the same unit where there are
fewer. stack: one piece of the rank after the other, which is what several entries of one parameter are.
megarl/resharding/block_shards.py turns them into shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Size = tuple[int, int, int]  # items, rows, columns
STACK = "{}"  # in a name: the placeholder of the item's number
# The ranks over which an engine cuts a parameter; Megatron has the tensor-parallel ranks for all but the experts.
Axis = Literal["attention", "dense", "shared", "experts"]


class TensorPart(NamedTuple):
    """Rows of a tensor of the checkpoint, or its columns: `units` times `size`, the n-th from `first` + n x `step` on.

    across: the extent of the other of the two axes. items: of a stack of experts. name: inside the layer.
    """

    name: str
    units: int
    size: int
    across: int
    step: int
    first: int = 0
    is_cols: bool = False
    items: int = 1

    @property
    def total(self) -> int:
        """The rows or columns of all units."""
        return self.units * self.size

    @property
    def tensor(self) -> tuple[str, Size]:
        """The tensor of the checkpoint, where this is all of it."""
        if self.is_cols:
            return self.name, (self.items, self.across, self.total)
        return self.name, (self.items, self.total, self.across)


def rows(name: str, units: int, size: int, cols: int, items: int = 1) -> TensorPart:
    """All rows of a matrix [units x size, cols]."""
    return TensorPart(name, units, size, cols, step=size, items=items)


def cols(name: str, units: int, size: int, num_rows: int, items: int = 1) -> TensorPart:
    """All columns of a matrix [num_rows, units x size]."""
    return TensorPart(name, units, size, num_rows, step=size, is_cols=True, items=items)


def vector(name: str, size: int, units: int = 1) -> TensorPart:
    """All elements of a vector of `units` x `size` elements."""
    return rows(name, units, size, 1)


def woven(name: str, units: int, sizes: Sequence[int], cols: int) -> list[TensorPart]:
    """The pieces of a matrix whose rows are, for each unit, sizes[0] rows of the first, sizes[1] of the next..."""
    step = sum(sizes)
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        TensorPart(name, units, size, cols, step=step, first=first)
        for first, size in zip(firsts, sizes, strict=True)
    ]


def stacked(name: str, pieces: Sequence[tuple[int, int]], cols: int) -> list[TensorPart]:
    """The pieces of a matrix that has them one after the other. pieces: (units, rows of a unit) of each."""
    firsts = [sum(units * size for units, size in pieces[:number]) for number in range(len(pieces))]
    return [
        TensorPart(name, units, size, cols, step=size, first=first)
        for first, (units, size) in zip(firsts, pieces, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Layout:
    """What the ranks hold of some pieces, which follow each other in each of `groups` groups."""

    pieces: tuple[TensorPart, ...]
    kind: Literal["cut", "spread", "copy"]
    groups: int = 1

    @property
    def total(self) -> int:
        return sum(piece.total for piece in self.pieces)

    def replicas(self, ranks: int) -> int:
        """The neighbouring ranks, of `ranks`, that hold the same."""
        if self.kind == "copy":
            return ranks
        if self.kind == "spread":
            return max(1, ranks // self.pieces[0].units)
        return 1


def cut(*pieces: TensorPart, groups: int = 1) -> Layout:
    """Evenly over the ranks; with `groups`, after weaving."""
    return Layout(pieces, "cut", groups)


def spread(piece: TensorPart) -> Layout:
    """Whole units over the ranks, the same one on neighbours where there are fewer."""
    return Layout((piece,), "spread")


def copy(*pieces: TensorPart, groups: int = 1) -> Layout:
    """Whole on every rank."""
    return Layout(pieces, "copy", groups)


@dataclass(frozen=True, eq=False)
class ParamPart:
    """A layout in a parameter, whose name is the one inside the layer. Entries of one parameter are stacked.

    bias: each weight has a bias, laid out alike, in the parameter of that name. dtype: torch's name of the parameter's
    type; "": the model's. merges_into: the linear layer of Megatron's into which TransformerEngine merges this norm.
    """

    param: str
    layout: Layout
    over: Axis = "attention"
    bias: bool = False
    dtype: str = ""
    merges_into: str = ""
