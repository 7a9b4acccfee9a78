"""What quantised weights should be, by the definition; imports nothing that a bare machine lacks."""

from __future__ import annotations

import torch

from megarl.resharding.fp8 import FP8

TILE = 128


def one_tile_at_a_time(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised block and its scales, each tile on its own."""
    items, rows, cols = block.shape
    quantised, scales = (
        torch.empty(block.shape, dtype=FP8),
        torch.empty(items, -(-rows // TILE), -(-cols // TILE)),
    )
    for item in range(items):
        for row in range(0, rows, TILE):
            for col in range(0, cols, TILE):
                tile = block[item, row : row + TILE, col : col + TILE].float()
                scale = tile.abs().max() / 448 if tile.any() else torch.tensor(1.0)
                scales[item, row // TILE, col // TILE] = scale
                quantised[item, row : row + TILE, col : col + TILE] = (tile / scale).to(FP8)
    return quantised, scales
