"""Sending activations between pipeline stages without their shapes: every stage knows the lengths of all rows.

For sequences of variable length Megatron's own communicator sends the shape before each tensor and waits for it on the
host, which leaves the GPU idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megarl.parallel import groups

Shape = list[int]
NOTHING: Shape = [0, 0, 0]  # the shape of a tensor that is not received


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one pass over rows of `lengths` tokens on this rank."""

    def __init__(self, config: Any, lengths: Sequence[int]) -> None:
        super().__init__(groups.pp_group(), config)
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[length // split, 1, config.hidden_size] for length in lengths]
        stage, last = self.pp_group.rank(), self.pp_group.size() - 1
        chunks, group = config.virtual_pipeline_model_parallel_size or 1, config.microbatch_group_size_per_vp_stage
        orders = (receive_order(len(shapes), chunks, group, leads) for leads in (stage == 0, stage == last))
        self._from_prev, self._from_next = (iter([shapes[row] for row in order]) for order in orders)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        return self._next(self._from_prev, recv_prev), self._next(self._from_next, recv_next)

    def _next(self, shapes: Iterator[Shape], is_received: bool) -> Shape:
        return next(shapes) if is_received else NOTHING


def receive_order(rows: int, chunks: int, group: int, leads: bool) -> list[int]:
    """The rows whose tensors a stage receives in one direction (forward or backward), in the schedule's order.

    chunks: model chunks a stage. group: rows that pass one chunk before the next chunk's turn. leads: whether the stage
    is the first in this direction, which receives nothing for its first chunk.
    """
    table = get_schedule_table(rows, chunks, group)
    return [row for row, chunk in table if not leads or chunk < chunks - 1]
