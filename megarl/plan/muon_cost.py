"""What Muon adds to a step and saves of the optimizer's state, from the matrices that the ranks of a layout have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megarl.model.matrices import layer_matrices
from megarl.model.shape import ModelShape
from megarl.parallel import newton_schulz
from megarl.placement.train_layout import TrainLayout
from megarl.training.matrix_parts import matrix_parts

SECOND_MOMENT_BYTES = 4  # float32; AdamW has it, and Muon for a matrix not


@dataclass(frozen=True)
class MuonWork:
    """A mean rank's part of an update of one pipeline stage; 0 with AdamW.

    elements: on which Muon steps. sent: those of matrices that several tensor-parallel ranks have in parts, which are
    sent to where a matrix is whole, and come back. flops: of making matrices orthogonal.
    """

    elements: float = 0.0
    sent: float = 0.0
    flops: float = 0.0


@lru_cache(maxsize=4096)
def muon_work(shape: ModelShape, layout: TrainLayout, stage: int, *, trains_mtp: bool) -> MuonWork:
    """Of a rank of the stage; the work on its matrices is shared out evenly among its ranks."""
    width = layout.world_size // layout.pp
    elements = sent = 0.0
    for part in matrix_parts(shape, layout, stage * width, transformer_engine=False):
        if "mtp." in part.param and not trains_mtp:
            continue
        replicas = layout.edp if ".experts." in part.param else layout.dp * layout.cp
        area = math.prod(part.size) / replicas
        elements += area
        if part.size != (part.rows, part.cols):
            sent += area
    layers = [
        layer
        for chunk in range(layout.vpp)
        for layer in layout.layers(stage, shape.num_layers, chunk)
    ]
    if stage == layout.pp - 1 and trains_mtp:
        layers += _mtp_layers(shape)
    flops = sum(
        matrices_alike.count * newton_schulz.flops(matrices_alike.rows, matrices_alike.cols)
        for layer in layers
        for matrices_alike in layer_matrices(shape, layer)
    )
    return MuonWork(elements, sent, flops / width)


def matrix_elements(shape: ModelShape) -> int:
    """Elements of all matrices of the decoder's layers."""
    return sum(
        matrices_alike.count * matrices_alike.rows * matrices_alike.cols
        for layer in range(shape.num_layers)
        for matrices_alike in layer_matrices(shape, layer)
    )


def _mtp_layers(shape: ModelShape) -> Iterable[int]:
    return range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
