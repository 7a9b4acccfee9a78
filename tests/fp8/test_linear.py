"""The exact linear layer: its value, what it does not depend on, and its gradients."""

from __future__ import annotations

import pytest
import torch

from megarl.fp8 import TILE, Fp8Backward, ScaleRule
from megarl.fp8.codes import quantise_groups
from megarl.fp8.linear import Codes, linear, multiply, product, weight_codes

RULE: ScaleRule = "powers_of_two"


def operands(
    tokens: int = 40, rows: int = 384, cols: int = 300
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and a weight whose groups and tiles have magnitudes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(0)
    factor = 10.0 ** torch.randint(-3, 4, (1, cols), generator=generator)
    hidden = torch.randn(tokens, cols, generator=generator) * factor
    return hidden, torch.randn(rows, cols, generator=generator) / factor


def test_a_block_has_the_value_of_integers() -> None:
    """A code is a multiple of 2**-9, so codes times 2**9 are integers."""
    hidden, weight = operands(cols=TILE)
    left = Codes(*quantise_groups(hidden, RULE))
    right = weight_codes(weight, RULE)
    integers = [(codes.values_RK.double() * 2**9).long() for codes in (left, right)]
    scales = left.scales.double() * right.scales.double()[:, 0]
    expected = (integers[0] @ integers[1].T).double() * 2.0**-18 * scales
    assert torch.equal(product(left, right), expected)


def test_blocks_are_scaled_and_added_in_order() -> None:
    hidden, weight = operands()
    codes = weight_codes(weight, RULE)
    exact = Codes(*quantise_groups(hidden, RULE)).dequantised(torch.float64) @ (
        codes.dequantised(torch.float64).T
    )
    out = multiply(hidden.double(), codes, RULE)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_depends_on_its_own_rows_alone(dtype: torch.dtype) -> None:
    hidden, weight = (tensor.to(dtype) for tensor in operands())
    whole = multiply(hidden, weight_codes(weight, RULE), RULE)
    assert whole.dtype == dtype
    for number, row in enumerate(hidden):
        assert torch.equal(multiply(row, weight_codes(weight, RULE), RULE), whole[number])
    cut = [multiply(hidden, weight_codes(part, RULE), RULE) for part in weight.split(TILE)]
    assert torch.equal(torch.cat(cut, 1), whole)
    inside = torch.randperm(TILE, generator=torch.Generator().manual_seed(1))
    order = torch.cat([inside, torch.arange(TILE, hidden.shape[1])])
    mixed = multiply(hidden[:, order], weight_codes(weight[:, order], RULE), RULE)
    assert torch.equal(mixed, whole)


@pytest.mark.parametrize("backward", ["high_precision", "dequantised", "fp8"])
def test_no_tokens_give_no_rows_and_no_gradient(backward: Fp8Backward) -> None:
    """As an expert that no token of a micro-batch is sent to."""
    hidden, weight = operands(tokens=0)
    weight.requires_grad_()
    out = linear(hidden, weight, RULE, backward)
    assert out.shape == (0, len(weight))
    out.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("backward", ["high_precision", "dequantised", "fp8"])
def test_gradients(backward: Fp8Backward) -> None:
    hidden, weight = operands()
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear(hidden[None], weight, RULE, backward)
    assert torch.equal(out[0], multiply(hidden, weight_codes(weight, RULE), RULE).detach())
    gradient = torch.randn(out[0].shape, generator=torch.Generator().manual_seed(2))
    out.backward(gradient[None])
    with torch.no_grad():
        left, right, of_out = hidden, weight, gradient
        right_codes = weight_codes(weight, RULE).dequantised(torch.float32)
        of_out_columns = gradient
        if backward == "dequantised":
            left = Codes(*quantise_groups(hidden, RULE)).dequantised(torch.float32)
            right = right_codes
        if backward == "fp8":
            left = Codes(*quantise_groups(hidden.T, RULE)).dequantised(torch.float32).T
            right = right_codes
            of_out = Codes(*quantise_groups(gradient, RULE)).dequantised(torch.float32)
            columns = Codes(*quantise_groups(gradient.T, RULE))
            of_out_columns = columns.dequantised(torch.float32).T
        expected = of_out @ right, of_out_columns.T @ left
    for mine, other in zip((hidden.grad, weight.grad), expected, strict=True):
        assert mine is not None
        assert (mine - other).norm() < 1e-5 * other.norm()
