"""The kernel of the gated delta rule that a GPU has, against the rule in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.device import DEVICE
from megarl.parallel.delta_net import kernel_rule, torch_rule
from megarl.parallel.optional_imports import delta_rule_kernel
from tests.gpu.conftest import Record

HEADS, WIDTH = 32, 128
LENGTHS = [1, 64, 700, 3000, 331]  # short, of whole chunks, and neither
BOUND = {torch.float32: 5e-3, torch.bfloat16: 2e-2}


@pytest.mark.skipif(DEVICE != "cuda", reason="of kernels that need a GPU")
@pytest.mark.parametrize("dtype", BOUND)
def test_the_kernel_computes_what_torch_does(dtype: torch.dtype, record: Record) -> None:
    """Unverified on a GPU.

    parallel/delta_net.py: where flash-linear-attention is not installed, the rule in torch runs on the GPU. To check
    first: outputs and gradients of a row of several segments, in float32 (whose products may be TF32) and in bfloat16.
    """
    kernel = delta_rule_kernel()
    if kernel is None:
        pytest.skip("flash-linear-attention is not installed")
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(DEVICE)
    inputs = _inputs(dtype)
    weights = torch.randn_like(inputs[2])
    expected = [
        each.float() for each in _with_gradients(torch_rule(*inputs, bounds), inputs, weights)
    ]
    computed = [
        each.float()
        for each in _with_gradients(kernel_rule(kernel, *inputs, bounds), inputs, weights)
    ]
    for name, ours, theirs in zip(("output", *"qkvgb"), expected, computed, strict=True):
        gap = float((ours - theirs).norm() / ours.norm())
        record(f"relative gap of {name}, {dtype}", gap, "")
        assert gap < BOUND[dtype]


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, HEADS, WIDTH, generator=generator) for _ in range(3))
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
    g = -torch.rand(total, HEADS, generator=generator)
    beta = torch.rand(total, HEADS, generator=generator)
    q, k, v = (each.to(DEVICE, dtype).requires_grad_() for each in (q, k, v * math.sqrt(0.5)))
    g, beta = (each.to(DEVICE).requires_grad_() for each in (g, beta))
    return q, k, v, g, beta


def _with_gradients(output: Tensor, inputs: tuple[Tensor, ...], weights: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]
