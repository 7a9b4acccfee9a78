"""Rectangles: which part of a logical tensor (the one in the HF checkpoint) lives where in a local parameter.

Integers only. A logical tensor and a parameter are both looked at as 2-D: [n] is [n, 1], [e, a, b] is [e * a, b].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]  # half open
Cell = tuple[int, int]  # row, column
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_TENSORS = frozenset({EMBEDDING, LM_HEAD})  # their parameters may end in padding rows, which no tensor fills


FAULTS_SHOWN = 3  # every layer repeats the same fault


class LayoutError(RuntimeError):
    """A map and the real parameters, or two maps, do not fit together; the message names the tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows x cols of the logical tensor `name` are stored in the parameter `param` from cell `at` on."""

    name: str
    rows: Range
    cols: Range
    param: str
    at: Cell

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]

    @property
    def area(self) -> int:
        return self.num_rows * self.num_cols

    def cell(self, row: int, col: int) -> Cell:
        """Where the logical element (row, col) is inside the parameter."""
        return self.at[0] + row - self.rows[0], self.at[1] + col - self.cols[0]


def intersect(a: Range, b: Range) -> Range:
    """The common part; empty (start == stop) when there is none."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def overlapping(rectangles: Iterable[tuple[Range, Range]]) -> bool:
    """Whether any two of the (rows, cols) rectangles share an element."""
    open_rectangles: list[tuple[Range, Range]] = []
    for rows, cols in sorted(r for r in rectangles if r[0][0] < r[0][1] and r[1][0] < r[1][1]):
        open_rectangles = [r for r in open_rectangles if r[0][1] > rows[0]]
        if any(other[0] < cols[1] and cols[0] < other[1] for _, other in open_rectangles):
            return True
        open_rectangles.append((rows, cols))
    return False


def param_table(shards: Sequence[Shard]) -> dict[str, tuple[int, int]]:
    """The 2-D shape that each parameter must have at least: the shards' extent, vocabulary padding not counted."""
    table: dict[str, tuple[int, int]] = {}
    for shard in shards:
        rows, cols = table.get(shard.param, (0, 0))
        table[shard.param] = (max(rows, shard.at[0] + shard.num_rows), max(cols, shard.at[1] + shard.num_cols))
    return table


def flat_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's shape looked at as 2-D."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def rectangle(tensor: torch.Tensor, at: Cell, num_rows: int, num_cols: int) -> torch.Tensor:
    """A writable [num_rows, num_cols] view of a contiguous parameter, looked at as 2-D."""
    view = tensor.detach().view(flat_shape(tensor.shape))
    return view[at[0] : at[0] + num_rows, at[1] : at[1] + num_cols]


def verify_params(shards: Sequence[Shard], params: Mapping[str, torch.Tensor]) -> None:
    """Prove that the map describes these parameters: same names, same shapes, every element covered exactly once.

    Only the parameters of the vocabulary tensors may have more rows than the shards fill. Raises LayoutError, which
    names the first parameters that do not fit.
    """
    by_param: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_param[shard.param].append(shard)
    table = param_table(shards)
    wrong = [f"{name}: the model has no such parameter" for name in table if name not in params]
    wrong += [f"{name}: the map does not know this parameter" for name in params if name not in table]
    for name in table.keys() & params.keys():
        wrong += _param_faults(name, table[name], params[name], by_param[name])
    if wrong:
        more = f"; and {len(wrong) - FAULTS_SHOWN} more" if len(wrong) > FAULTS_SHOWN else ""
        raise LayoutError("weight map and model differ: " + "; ".join(sorted(wrong)[:FAULTS_SHOWN]) + more)


def _param_faults(name: str, mapped: tuple[int, int], param: torch.Tensor, shards: list[Shard]) -> list[str]:
    real = flat_shape(param.shape)
    padded = shards[0].name in VOCAB_TENSORS and real[0] >= mapped[0]
    if real[1] != mapped[1] or (real[0] != mapped[0] and not padded):
        return [f"{name}: the map needs {list(mapped)}, the model has {list(param.shape)}"]
    if not param.is_contiguous():
        return [f"{name}: the parameter is not contiguous in memory"]
    if sum(s.area for s in shards) != mapped[0] * mapped[1]:
        return [f"{name}: the map does not cover every element"]
    if overlapping(((s.at[0], s.at[0] + s.num_rows), (s.at[1], s.at[1] + s.num_cols)) for s in shards):
        return [f"{name}: the map covers an element twice"]
    return []
