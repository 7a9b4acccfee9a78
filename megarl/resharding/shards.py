"""Shards: boxes of logical tensors (those of the HF checkpoint) and their places in local parameters.

Integers only. A logical tensor is [rows, cols]; [n] is [n, 1]. The experts' tensors of a layer are treated as one
stack, [items, rows, cols], because they are split alike: one box covers several experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megarl.model.quantisation import FP8_TILE
from megarl.model.tensors import EMBEDDING, LM_HEAD, STACK, Size
from megarl.types.tensors import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]  # half open
Cell = tuple[int, int, int]  # item, row, column
Box = tuple[Range, Range, Range]  # items, rows, columns
FP8 = "float8_e4m3fn"  # torch's name of the type of weights in tiles
VOCAB_TENSORS = frozenset({EMBEDDING, LM_HEAD})  # their parameters may end in padding rows
_CONVOLUTION = "conv1d.weight"  # ends the names of weights [channels, 1, width]
_ERRORS_SHOWN = 3


class LayoutError(RuntimeError):
    """A map and the real parameters, or two maps, do not fit together; the message names the tensor."""


class Shard(NamedTuple):
    """The box items x rows x cols of the logical tensor `name`, stored in the parameter `param` from cell `at` on.

    `name` contains "{}" where it is a stack. `param` contains "{}" where each item is a parameter of its own, numbered
    from at[0] on; otherwise the parameter is viewed as [items, rows, cols]. A named tuple, because a plan has many.
    """

    name: str
    rows: Range
    cols: Range
    param: str
    at: Cell = (0, 0, 0)
    items: Range = (0, 1)
    dtype: str = ""  # torch's name of the parameter's type; "": the model's

    @property
    def box(self) -> Box:
        return self.items, self.rows, self.cols

    @property
    def size(self) -> Size:
        return box_size(self.box)

    @property
    def area(self) -> int:
        return box_area(self.box)

    def cell(self, box: Box) -> Cell:
        """The cell of the parameter that has the first element of a logical box."""
        (item, row, col) = self.at
        ((items, _), (rows, _), (cols, _)) = box
        return item + items - self.items[0], row + rows - self.rows[0], col + cols - self.cols[0]


class Part(NamedTuple):
    """Shards that all of `members` hold (replicas). members: numbers of GPU slots, ascending."""

    shards: tuple[Shard, ...]
    members: tuple[int, ...]


def share(size: int, ranks: int, rank: int) -> Range:
    """The range of `rank` when `size` elements are split evenly over `ranks`."""
    return rank * (size // ranks), (rank + 1) * (size // ranks)


def tiles(elements: Range) -> Range:
    """The numbers of the fp8 tiles that contain a range of rows or columns."""
    return elements[0] // FP8_TILE, -(-elements[1] // FP8_TILE)


def intersect(a: Range, b: Range) -> Range:
    """The intersection; an empty range (start == stop) when there is none."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """The intersection, or None when it is empty."""
    items = intersect(a[0], b[0])
    rows = intersect(a[1], b[1])
    cols = intersect(a[2], b[2])
    empty = items[0] == items[1] or rows[0] == rows[1] or cols[0] == cols[1]
    return None if empty else (items, rows, cols)


def box_size(box: Box) -> Size:
    """Items, rows, columns."""
    items, rows, cols = box
    return items[1] - items[0], rows[1] - rows[0], cols[1] - cols[0]


def box_area(box: Box) -> int:
    """Number of elements."""
    items, rows, cols = box
    return (items[1] - items[0]) * (rows[1] - rows[0]) * (cols[1] - cols[0])


def overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element; None where no two do."""
    still_open: list[Box] = []
    for box in sorted(box for box in boxes if box_area(box)):
        still_open = [other for other in still_open if other[0][1] > box[0][0]]
        for other in still_open:
            if intersect_boxes(other, box):
                return other, box
        still_open.append(box)
    return None


def shape_as_stack(param: str, shape: Sequence[int]) -> Size:
    """A parameter's shape viewed as [items, rows, cols]; [n] is [1, n, 1], a convolution's [n, 1, k] is [1, n, k]."""
    if len(shape) < 2:
        return 1, (shape[0] if shape else 1), 1
    if len(shape) > 3:
        raise LayoutError(f"a parameter of shape {list(shape)} has more than three dimensions")
    if len(shape) == 3 and shape[1] == 1 and param.endswith(_CONVOLUTION):
        return 1, shape[0], shape[2]
    items = shape[0] if len(shape) == 3 else 1
    return items, shape[-2], shape[-1]


def views(params: NamedTensors, param: str, at: Cell, size: Size) -> list[Tensor]:
    """Writable views of contiguous parameters: one [items, rows, cols], or [1, rows, cols] for each item's parameter.

    param, at: as in a Shard.
    """
    (item, row, col) = at
    (num_items, num_rows, num_cols) = size
    if STACK in param:
        numbers = range(item, item + num_items)
        return [
            _view(params, param.format(number), (0, row, col), (1, num_rows, num_cols))
            for number in numbers
        ]
    return [_view(params, param, at, size)]


def _view(params: NamedTensors, param: str, at: Cell, size: Size) -> Tensor:
    tensor = params[param]
    stack = tensor.detach().view(shape_as_stack(param, tensor.shape))
    for dim, (start, length) in enumerate(zip(at, size, strict=True)):
        stack = stack.narrow(dim, start, length)
    return stack


def cells(shard: Shard) -> Iterator[tuple[str, Box]]:
    """The parameters that a shard fills, each with the box of its cells."""
    (item, row, col) = shard.at
    (num_items, num_rows, num_cols) = shard.size
    plane = (row, row + num_rows), (col, col + num_cols)
    if STACK in shard.param:
        for number in range(item, item + num_items):
            yield shard.param.format(number), ((0, 1), *plane)
    else:
        yield shard.param, ((item, item + num_items), *plane)


def param_table(shards: Sequence[Shard]) -> dict[str, Size]:
    """The minimum size of each parameter: the extent of its shards, without padding of the vocabulary."""
    table: dict[str, Size] = {}
    for shard in shards:
        for param, (items, rows, cols) in cells(shard):
            before = table.get(param, (0, 0, 0))
            table[param] = (
                max(before[0], items[1]),
                max(before[1], rows[1]),
                max(before[2], cols[1]),
            )
    return table


def verify_params(shards: Sequence[Shard], params: NamedTensors) -> None:
    """Prove that the map describes these parameters: same names, same shapes, every element covered exactly once.

    Only parameters of vocabulary tensors may have more rows than the shards. Raises LayoutError, which names the first
    parameters that differ.
    """
    filled: dict[str, list[Box]] = defaultdict(list)
    padded: set[str] = set()
    for shard in shards:
        for param, box in cells(shard):
            filled[param].append(box)
            if shard.name in VOCAB_TENSORS:
                padded.add(param)
    table = param_table(shards)
    wrong = [f"{name}: the model has no such parameter" for name in table if name not in params]
    wrong += [
        f"{name}: the map does not know this parameter" for name in params if name not in table
    ]
    for name in table.keys() & params.keys():
        wrong += _param_errors(name, table[name], params[name], filled[name], name in padded)
    if wrong:
        raise LayoutError(f"weight map and model differ: {first_of(sorted(wrong))}")


def first_of(errors: Sequence[str]) -> str:
    """The first errors for an error message, and how many more there are: every layer repeats the same error."""
    if len(errors) > _ERRORS_SHOWN:
        more = f"; and {len(errors) - _ERRORS_SHOWN} more"
    else:
        more = ""
    return "; ".join(errors[:_ERRORS_SHOWN]) + more


def _param_errors(
    name: str, mapped: Size, param: Tensor, boxes: list[Box], padded: bool
) -> list[str]:
    real = shape_as_stack(name, param.shape)
    long_enough = real[1] == mapped[1] or (padded and real[1] > mapped[1])
    if (real[0], real[2]) != (mapped[0], mapped[2]) or not long_enough:
        return [f"{name}: the map needs {list(mapped)}, the model has {list(param.shape)}"]
    if not param.is_contiguous():
        return [f"{name}: the parameter is not contiguous in memory"]
    if sum(map(box_area, boxes)) != mapped[0] * mapped[1] * mapped[2]:
        return [f"{name}: the map does not cover every element"]
    if overlap(boxes):
        return [f"{name}: the map covers an element twice"]
    return []
