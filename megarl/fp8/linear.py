"""What a linear layer in fp8 gives, exactly: on CPUs the trainer's and the engine's layers both compute with it.

A product of two codes has 8 bits and a sum of 128 of them fits float64, so a block of 128 terms has one right value in
any order. The blocks of a row are scaled and added in order. A result depends on its own row of activations and its own
row of weights alone: not on the batch, on threads, or on how a layer's rows are cut over ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.fp8 import TILE, Fp8Backward, ScaleRule
from megarl.fp8.codes import quantise, quantise_groups, tile_scales


class Codes(NamedTuple):
    """A matrix [R, K] as codes, and float32 scales [R, ceil(K / 128)] of the groups of each row."""

    values_RK: Tensor
    scales: Tensor

    @staticmethod
    def of_tiles(values_NK: Tensor, scales: Tensor) -> Codes:
        """Of a weight with one scale for each tile, [ceil(N / 128), ceil(K / 128)]."""
        return Codes(values_NK, scales.repeat_interleave(TILE, 0)[: len(values_NK)])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Codes times scales; exact in 16 bits where scales are powers of two."""
        num_columns = self.values_RK.shape[1]
        scales_RK = self.scales.repeat_interleave(TILE, 1)[:, :num_columns]
        return (self.values_RK.float() * scales_RK).to(dtype)


def weight_codes(weight_NK: Tensor, rule: ScaleRule) -> Codes:
    """A weight as the sender of a reshard quantises it."""
    block = weight_NK.detach()[None]
    return Codes.of_tiles(quantise(block, rule)[0], tile_scales(block, rule)[0])


def product(left: Codes, right: Codes) -> Tensor:
    """left [T, K] times the transpose of right [N, K]: float64 [T, N]."""
    rows_TK = left.values_RK.double()
    columns_NK = right.values_RK.double()
    left_scales = left.scales.double()
    right_scales = right.scales.double()
    total_TN = left_scales.new_zeros(len(left.values_RK), len(right.values_RK))
    for block in range(left_scales.shape[1]):
        inside = slice(block * TILE, (block + 1) * TILE)
        scales_TN = left_scales[:, block, None] * right_scales[:, block]
        total_TN += (rows_TK[:, inside] @ columns_NK[:, inside].T) * scales_TN
    return total_TN


def multiply(hidden: Tensor, weight: Codes, rule: ScaleRule) -> Tensor:
    """A linear layer without gradients: hidden [..., K] of any float type to [..., N] of the same."""
    rows_TK = hidden.reshape(-1, hidden.shape[-1])
    out_TN = product(Codes(*quantise_groups(rows_TK, rule)), weight)
    return out_TN.to(hidden.dtype).view(*hidden.shape[:-1], out_TN.shape[1])


def linear(hidden: Tensor, weight_NK: Tensor, rule: ScaleRule, backward: Fp8Backward) -> Tensor:
    """The product [..., N] of hidden [..., K] and a trained weight in codes; gradients pass the rounding of both."""
    return _Linear.apply(hidden, weight_NK, rule, backward)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight_NK: Tensor, rule: ScaleRule, backward: Fp8Backward
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight_NK)
        ctx.rule = rule
        ctx.backward_with = backward
        return multiply(hidden, weight_codes(weight_NK, rule), rule)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        hidden, weight_NK = ctx.saved_tensors
        (gradient,) = gradients
        rows_TK = hidden.reshape(-1, hidden.shape[-1])
        gradient_TN = gradient.reshape(-1, gradient.shape[-1])
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        of_hidden = of_weight = None
        if needs_hidden:
            of_hidden = _hidden_gradient(gradient_TN, weight_NK, ctx.rule, ctx.backward_with)
            of_hidden = of_hidden.view(hidden.shape)
        if needs_weight:
            of_weight = _weight_gradient(gradient_TN, rows_TK, ctx.rule, ctx.backward_with)
            of_weight = of_weight.to(weight_NK.dtype)
        return of_hidden, of_weight, None, None


def _hidden_gradient(
    gradient_TN: Tensor, weight_NK: Tensor, rule: ScaleRule, backward: Fp8Backward
) -> Tensor:
    """[T, K]; in fp8 the weight's codes are those of the forward pass."""
    if backward == "high_precision":
        return gradient_TN @ weight_NK
    weight = weight_codes(weight_NK, rule)
    if backward == "dequantised":
        return gradient_TN @ weight.dequantised(gradient_TN.dtype)
    scales = weight.scales[::TILE].T
    transposed = Codes.of_tiles(weight.values_RK.T, scales)
    return multiply(gradient_TN, transposed, rule)


def _weight_gradient(
    gradient_TN: Tensor, rows_TK: Tensor, rule: ScaleRule, backward: Fp8Backward
) -> Tensor:
    """[N, K]; in fp8 both sides have scales of groups of 128 tokens."""
    if backward == "high_precision":
        return gradient_TN.T @ rows_TK
    if backward == "dequantised":
        return gradient_TN.T @ Codes(*quantise_groups(rows_TK, rule)).dequantised(rows_TK.dtype)
    columns = Codes(*quantise_groups(rows_TK.T, rule))
    return product(Codes(*quantise_groups(gradient_TN.T, rule)), columns)
