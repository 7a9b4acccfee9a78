"""SGLang's fp8 methods on CPU give the bits of the trainer's layers, however ranks cut the weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megarl.cpu import sglang_patches
from megarl.fp8 import ScaleRule
from megarl.fp8.codes import quantise, tile_scales
from megarl.fp8.linear import linear

pytestmark = pytest.mark.slow

HIDDEN, FFN, EXPERTS, TOKENS, CHOSEN = 256, 256, 4, 13, 2
RANKS = 2


@pytest.fixture(scope="module")
def methods() -> Any:
    """SGLang's module with its methods of fp8, patched."""
    with sglang_patches.quiet_import():
        sglang_patches.prepare()
        from sglang.srt.layers.quantization import fp8
    from megarl.cpu import sglang_fp8

    sglang_fp8.compute_with_codes()
    return fp8


def config(rule: ScaleRule) -> SimpleNamespace:
    return SimpleNamespace(scale_fmt="ue8m0" if rule == "powers_of_two" else None)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(weight: torch.Tensor, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """An engine's parameters of a weight [rows, columns] or of a stack of them."""
    block = weight if weight.dim() == 3 else weight[None]
    codes = quantise(block, rule)
    scales = tile_scales(block, rule)
    return (codes, scales) if weight.dim() == 3 else (codes[0], scales[0])


@pytest.mark.parametrize("rule", ["exact", "powers_of_two"])
@pytest.mark.parametrize("cut", [0, 1], ids=["columns", "rows"])
def test_a_linear_layer_has_the_trainers_bits(methods: Any, rule: ScaleRule, cut: int) -> None:
    """Whole, and cut over ranks as Megatron's column- and row-parallel layers are."""
    hidden = random(TOKENS, HIDDEN)
    weight = random(FFN, HIDDEN, seed=1)
    bias = random(FFN, seed=2)
    apply: Callable[..., torch.Tensor] = methods.Fp8LinearMethod.apply
    method = SimpleNamespace(quant_config=config(rule))
    hidden_parts = [hidden] * RANKS if cut == 0 else hidden.chunk(RANKS, 1)
    cuts = zip([hidden, *hidden_parts], [weight, *weight.chunk(RANKS, cut)], strict=True)
    for rows, part in cuts:
        codes, scales = stored(part, rule)
        layer = SimpleNamespace(weight=codes, weight_scale_inv=scales)
        trained = linear(rows, part, rule, "dequantised")
        assert torch.equal(apply(method, layer, rows), trained)
        if cut == 0:
            own_bias = bias[: len(part)]
            assert torch.equal(apply(method, layer, rows, own_bias), trained + own_bias)


@pytest.mark.parametrize("experts", [range(EXPERTS), range(2, 4)], ids=["whole", "ep2"])
def test_experts_have_the_trainers_bits(methods: Any, experts: range) -> None:
    """Each chosen expert's output, multiplied with the router's weight afterwards."""
    rule: ScaleRule = "powers_of_two"
    hidden = random(TOKENS, HIDDEN)
    first = random(EXPERTS, 2 * FFN, HIDDEN, seed=1)
    second = random(EXPERTS, HIDDEN, FFN, seed=2)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOSEN)
    codes = [stored(weight[experts.start : experts.stop], rule) for weight in (first, second)]
    layer = SimpleNamespace(
        w13_weight=codes[0][0],
        w13_weight_scale_inv=codes[0][1],
        w2_weight=codes[1][0],
        w2_weight_scale_inv=codes[1][1],
    )
    runner = SimpleNamespace(activation="silu", apply_router_weight_on_input=False)
    method = SimpleNamespace(quant_config=config(rule), moe_runner_config=runner)
    local_ids = torch.where((ids >= experts.start) & (ids < experts.stop), ids - experts.start, -1)
    dispatched = SimpleNamespace(hidden_states=hidden, topk_output=(weights, local_ids, None))
    out = methods.Fp8MoEMethod.apply(method, layer, dispatched).hidden_states
    expected = torch.zeros_like(hidden)
    for expert in experts:
        for token in range(TOKENS):
            for choice in range(CHOSEN):
                if ids[token, choice] != expert:
                    continue
                row = linear(hidden[token], first[expert], rule, "dequantised")
                gate, up = row.chunk(2)
                row = linear(F.silu(gate) * up, second[expert], rule, "dequantised")
                expected[token] += (row * weights[token, choice]).bfloat16()
    assert torch.equal(out, expected)
