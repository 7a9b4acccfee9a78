"""Muon's step on whole matrices: the nearest orthogonal matrix, approximately, by Newton-Schulz iterations.

Coefficients, iterations and order of operations are those of torch.optim.Muon (K. Jordan, "Muon: an optimizer for
hidden layers in neural networks", 2024); the scale is that of "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7
_SCALE = 0.2  # root mean square of AdamW's usual update


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, rows, cols] -> the same with singular values near 1, in the type of the argument."""
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    wide = wide / norms.clamp(min=_LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        wide = torch.baddbmm(wide, polynomial, wide, beta=linear)
    return wide.mT if is_tall else wide


def update_scale(rows: int, cols: int) -> float:
    """By what an orthogonalised matrix is multiplied, besides the learning rate, to change weights as AdamW does."""
    return _SCALE * math.sqrt(max(rows, cols))


def flops(rows: int, cols: int) -> int:
    """Floating point operations of `orthogonalised` for one matrix."""
    short, long = sorted((rows, cols))
    return ITERATIONS * (4 * short * short * long + 2 * short**3)
