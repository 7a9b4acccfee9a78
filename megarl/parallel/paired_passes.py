"""A micro-batch's pass through a model chunk in parts, for Megatron's combined 1F1B.

With `overlap_moe_expert_parallel_comm` Megatron runs the forward pass of one micro-batch beside the backward pass of
another, layer by layer, so that the tokens of one are exchanged under the products of the other
(pipeline_parallel/combined_1f1b.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from torch import Tensor

from megarl.parallel.model import Chunk


class ChunkPass(TransformerModelChunkSchedulePlan):
    """The forward pass of one row, made when it is due, and its backward pass, for which Megatron keeps it.

    Without multi-token prediction layers, which Megatron does not run in parts with packed rows. see_output: gets the
    chunk's output.
    """

    def __init__(self, chunk: Chunk, see_output: Callable[[Tensor], None], **inputs: Any) -> None:
        self._mtp = getattr(chunk, "mtp", None)
        self._see_output = see_output
        super().__init__(chunk, **inputs)

    def _build_layer_schedule_plan(self, module: Any, *streams: Any) -> None:
        if module is not self._mtp:
            super()._build_layer_schedule_plan(module, *streams)

    @staticmethod
    def run(
        f_schedule_plan: ChunkPass | None, b_schedule_plan: ChunkPass | None, **pipeline: Any
    ) -> Tensor | None:
        """Megatron's, for a pass, a backward pass or both; the output of the pass."""
        output: Any = TransformerModelChunkSchedulePlan.run(
            f_schedule_plan, b_schedule_plan, **pipeline
        )
        if f_schedule_plan is not None:
            f_schedule_plan._see_output(output)
        return output
