"""The matrices of a model's linear layers as an optimizer of whole matrices (Muon) sees them, numbered.

They are the checkpoint's, in every layout: an expert's gate, up and down projection are three. Heads of attention do
not depend on each other, so that each head of queries, keys, values and of MLA's up projections is a matrix of its own.
Embedding, output layer, norms, biases, routers, convolutions and what is no matrix are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from megarl.model.families import layer_of, layer_prefix, mtp_block, mtp_prefix
from megarl.model.families.blocks import Block
from megarl.model.families.layouts import TensorPart
from megarl.model.shape import ModelShape

_LINEAR = re.compile(r"\b(linear_\w+|in_proj|out_proj|eh_proj)(\.weight)?$")  # Megatron's modules
_KV_UP = "kv_b_proj.weight"  # of each head the rows of its key, then those of its value


class Matrices(NamedTuple):
    """Matrices [rows, cols] of a tensor of the checkpoint, or of a stack of them, whose name contains "{}".

    The n-th of `units` units are `size` rows of the tensor from `first` + n x `step` on. Each unit of each item is a
    matrix, with `by_unit`; else all units of an item are one. number: of the first.
    """

    number: int
    tensor: str
    items: int
    units: int
    size: int
    step: int
    first: int
    cols: int
    by_unit: bool

    @property
    def rows(self) -> int:
        return self.size if self.by_unit else self.units * self.size

    @property
    def count(self) -> int:
        return self.items * (self.units if self.by_unit else 1)


def matrices(shape: ModelShape) -> Iterator[Matrices]:
    """Of all layers, in their order; those of multi-token prediction too."""
    number = 0
    for layer in range(shape.num_layers + shape.num_mtp_layers):
        for each in layer_matrices(shape, layer):
            yield each._replace(number=number + each.number)
        number += sum(each.count for each in layer_matrices(shape, layer))


def layer_matrices(shape: ModelShape, layer: int) -> list[Matrices]:
    """Of one layer, numbered from 0; multi-token prediction layers count on from the decoder's."""
    blocks = layer_of(shape, layer)
    prefix = layer_prefix(shape, layer)
    parts = [(prefix, piece, True) for piece in _pieces(blocks.mixer)]
    parts += [(prefix, piece, False) for piece in _pieces(blocks.mlp)]
    if layer >= shape.num_layers:
        frame = mtp_prefix(shape, layer - shape.num_layers)
        parts += [(frame, piece, False) for piece in _pieces(mtp_block(shape))]
    of_layer: list[Matrices] = []
    number = 0
    for before, piece, mixes in parts:
        for own in _matrices(shape, piece, mixes):
            of_layer.append(own._replace(number=number, tensor=before + own.tensor))
            number += own.count
    return of_layer


def _pieces(block: Block) -> Iterator[TensorPart]:
    for entry in block.megatron:
        if _LINEAR.search(entry.param):
            yield from entry.layout.pieces


def _matrices(shape: ModelShape, piece: TensorPart, mixes: bool) -> Iterator[Matrices]:
    """Of a piece of a tensor. mixes: it belongs to attention."""
    whole = Matrices(
        number=0,
        tensor=piece.name,
        items=piece.items,
        units=piece.units,
        size=piece.size,
        step=piece.step,
        first=piece.first,
        cols=piece.across,
        by_unit=False,
    )
    if piece.is_cols:
        yield whole._replace(
            units=1, size=piece.across, step=piece.across, first=0, cols=piece.total
        )
    elif mixes and shape.mla and piece.name.endswith(_KV_UP):
        key = whole._replace(size=shape.mla.nope_dim, by_unit=True)
        yield key
        yield key._replace(size=shape.mla.v_dim, first=piece.first + shape.mla.nope_dim)
    elif mixes and piece.units > 1 and piece.size > 1:
        yield whole._replace(by_unit=True)
    elif piece.step == piece.size:
        yield whole._replace(units=1, size=piece.total, step=piece.total)
    else:
        yield whole
