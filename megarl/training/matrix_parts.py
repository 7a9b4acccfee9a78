"""Which rectangles of the model's matrices a rank has, for an optimizer of whole matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megarl.model.matrices import Matrices, matrices
from megarl.model.shape import ModelShape
from megarl.parallel.matrix_exchange import MatrixPart
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Shard, cells, intersect


def matrix_parts(
    shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool
) -> list[MatrixPart]:
    """All that training rank `rank` has of `matrices(shape)`, by the names of its parameters."""
    of_tensor: dict[str, list[Matrices]] = defaultdict(list)
    for each in matrices(shape):
        of_tensor[each.tensor].append(each)
    return [
        part
        for shard in megatron_map.shards(shape, layout, rank, transformer_engine)
        for each in of_tensor.get(shard.name, ())
        for part in _parts(shard, each)
    ]


def _parts(shard: Shard, of: Matrices) -> Iterator[MatrixPart]:
    first_row = shard.rows[0]
    for unit in range(of.units):
        start = of.first + unit * of.step
        rows = intersect((start, start + of.size), shard.rows)
        if rows[0] == rows[1]:
            continue
        inside = rows[0] - start
        number = of.number
        if of.by_unit:
            number += unit
        else:
            inside += unit * of.size
        for item, (param, (_, param_rows, param_cols)) in zip(
            range(*shard.items), cells(shard), strict=True
        ):
            yield MatrixPart(
                number=number + item * (of.count // of.items),
                rows=of.rows,
                cols=of.cols,
                at=(inside, shard.cols[0]),
                size=(rows[1] - rows[0], shard.cols[1] - shard.cols[0]),
                param=param,
                param_at=(param_rows[0] + rows[0] - first_row, param_cols[0]),
            )
