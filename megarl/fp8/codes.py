"""Codes of float8_e4m3fn and their float32 scales: value = code x scale.

A weight has a scale for each tile of 128 x 128, an activation for each group of 128 values of a token. The result of a
tile or group depends on it alone, so a rectangle with tile boundaries gives the same bytes as the whole tensor.

With scales that are powers of two all quantisers in use give the same bits: TransformerEngine's, which rounds
448 / amax down (compute_scale_from_amax in recipe/recipe_common.cuh), DeepGEMM's and SGLang's, which round amax / 448
up (ceil_to_ue8m0).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from megarl.fp8 import TILE, ScaleRule

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
# 448 is 0.875 x 2**9, as torch.frexp splits it
_MANTISSA = 0.875
_EXPONENT = 9
_LEAST_EXPONENT = -126  # of a float32 that is not denormal, which GPUs may flush to 0


def quantise(block: Tensor, rule: ScaleRule = "exact") -> Tensor:
    """Quantise a block [items, rows, cols] of any float type, which begins on a tile boundary, to float8_e4m3fn.

    Needs float32 memory for a strip of 128 rows. Last tiles may be smaller.
    """
    quantised = torch.empty(block.shape, dtype=FP8, device=block.device)
    for (item, strip), rows in _strips(block):
        scales = _scales(rows, rule).repeat_interleave(TILE)[: rows.shape[1]]
        # a denormal scale may have been rounded down
        scaled = rows.div_(scales).clamp_(-LARGEST, LARGEST)
        quantised[item, strip * TILE : (strip + 1) * TILE].copy_(scaled)
    return quantised


def tile_scales(block: Tensor, rule: ScaleRule = "exact") -> Tensor:
    """The float32 scales [items, ceil(rows / 128), ceil(cols / 128)] of a block that begins on a tile boundary.

    1 for a tile of zeros.
    """
    items, rows, cols = block.shape
    scales = torch.empty(
        items, -(-rows // TILE), -(-cols // TILE), dtype=torch.float32, device=block.device
    )
    for (item, strip), part in _strips(block):
        scales[item, strip] = _scales(part, rule)
    return scales


def quantise_groups(rows_TK: Tensor, rule: ScaleRule = "exact") -> tuple[Tensor, Tensor]:
    """The codes [T, K] of activations, and the float32 scales [T, ceil(K / 128)] of their groups.

    The last group of a row may be smaller.
    """
    values = functional.pad(rows_TK.float(), (0, -rows_TK.shape[1] % TILE))
    groups = values.reshape(len(rows_TK), values.shape[1] // TILE, TILE)
    scales = scales_of(groups.abs().amax(2), rule)
    codes = (groups / scales[..., None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return codes.flatten(1)[:, : rows_TK.shape[1]], scales


def scales_of(largest: Tensor, rule: ScaleRule) -> Tensor:
    """The scales of tiles or groups with these largest magnitudes, in float32."""
    if rule == "powers_of_two":
        mantissa, exponent = torch.frexp(largest)
        # the least power of two by which the largest is divided to at most 448
        power = exponent - _EXPONENT + (mantissa > _MANTISSA).int()
        scales = torch.ldexp(torch.ones_like(largest), power.clamp_(min=_LEAST_EXPONENT))
        # a number that is not finite makes codes that are none, as by exact scales
        scales = torch.where(largest.isfinite(), scales, largest)
        return torch.where(largest == 0, 1.0, scales)
    # by a scalar, CUDA would multiply with its reciprocal
    scales = largest / torch.full_like(largest, LARGEST)
    return torch.where(scales == 0, 1.0, scales)


def _strips(block: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """((item, number of the strip), a float32 copy of the strip's at most 128 rows)."""
    for item, matrix in enumerate(block):
        for strip, rows in enumerate(matrix.split(TILE)):
            yield (item, strip), rows.to(torch.float32, copy=True)


def _scales(rows: Tensor, rule: ScaleRule) -> Tensor:
    """One scale for each tile of a strip [up to 128, cols]."""
    largest = rows.abs().amax(0)
    ragged = -len(largest) % TILE
    return scales_of(functional.pad(largest, (0, ragged)).view(-1, TILE).amax(1), rule)
