"""fp8 tiles that a device makes, against tiles made one at a time on the CPU, byte for byte."""

from __future__ import annotations

import time

import pytest
import torch

from megarl.device import DEVICE
from megarl.resharding import fp8
from megarl.resharding.transport import settle
from tests.gpu.conftest import Record
from tests.gpu.exchange import same_bytes

ON_GPU = DEVICE == "cuda"
SHAPES = [(1, 128, 128), (3, 256, 384), (2, 300, 200), (1, 1, 1)] + [(4, 2048, 7168)] * ON_GPU
TILE = 128


def block(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary weights with a tile of zeros, very large and very small ones, on the CPU."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    made[0, :TILE, :TILE] = 0 if shape[1] > TILE else made[0, :TILE, :TILE]
    made[-1, -1, -1] = 3e38
    made[-1, 0, -1] = 1e-38
    made[0, -1, 0] = -0.0
    return made.to(dtype)


def tiles_one_by_one(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8, scales) from the definition: each tile alone."""
    items, rows, cols = weights.shape
    found = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(items, -(-rows // TILE), -(-cols // TILE))
    for item in range(items):
        for i, row in enumerate(range(0, rows, TILE)):
            for j, col in enumerate(range(0, cols, TILE)):
                tile = weights[item, row : row + TILE, col : col + TILE].float()
                scale = tile.abs().max() / 448
                scale = scale if scale > 0 else torch.ones(())
                scales[item, i, j] = scale
                scaled = (tile / scale).clamp(-448, 448)
                found[item, row : row + TILE, col : col + TILE] = scaled.to(torch.float8_e4m3fn)
    return found, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_equal_the_cpus(shape: tuple[int, int, int], dtype: torch.dtype, record: Record) -> None:
    weights = block(shape, dtype)
    on_device = weights.to(DEVICE)
    settle(60.0)
    started = time.perf_counter()
    found, scales = fp8.quantise(on_device), fp8.tile_scales(on_device)
    settle(60.0)
    seconds = time.perf_counter() - started
    expected, expected_scales = tiles_one_by_one(weights)
    assert same_bytes(scales, expected_scales)
    assert same_bytes(found, expected)
    record("rate", weights.nbytes / seconds / 1e9, "GB/s")
