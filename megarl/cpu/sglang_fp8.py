"""Linear layers and experts of SGLang's fp8 engines on CPU, where its own kernels need AMX and round otherwise.

They compute the exact value (megarl/fp8/linear.py), as training ranks do with `train.numbers: engine`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.cpu.sglang_experts import sum_local_experts
from megarl.fp8 import ScaleRule
from megarl.fp8.linear import Codes, multiply

_DTYPES = torch.float32, torch.bfloat16, torch.float16


def compute_with_codes() -> None:
    """Replace what SGLang's two methods of fp8 do after loading and in a forward pass.

    After loading nothing is done: the parameters stay as resharding writes them. Activations may be in float32, too.
    """
    from sglang.srt.layers.quantization import fp8

    methods: tuple[Any, ...] = fp8.Fp8LinearMethod, fp8.Fp8MoEMethod
    for method in methods:
        method.process_weights_after_loading = lambda self, layer: None
    config: Any = fp8.Fp8Config
    config.get_supported_act_dtypes = classmethod(lambda cls: [*_DTYPES])
    linear_method, expert_method = methods
    linear_method.apply = _apply_linear
    expert_method.apply = _apply_experts


def _rule(method: Any) -> ScaleRule:
    """The rule of the scales, which megarl names in the engine's `quantization_config`."""
    return "powers_of_two" if method.quant_config.scale_fmt == "ue8m0" else "exact"


def _apply_linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """In place of Fp8LinearMethod.apply; the names of its arguments are SGLang's."""
    out = multiply(x, Codes.of_tiles(layer.weight, layer.weight_scale_inv), _rule(self))
    return out if bias is None else out + bias


def _apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """In place of Fp8MoEMethod.apply; the names of its arguments are SGLang's."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    rule = _rule(self)
    assert self.moe_runner_config.activation == "silu"
    assert not self.moe_runner_config.apply_router_weight_on_input

    def compute(expert: int, rows_TH: Tensor) -> Tensor:
        w13 = Codes.of_tiles(layer.w13_weight[expert], layer.w13_weight_scale_inv[expert])
        w2 = Codes.of_tiles(layer.w2_weight[expert], layer.w2_weight_scale_inv[expert])
        gate, up = multiply(rows_TH, w13, rule).chunk(2, dim=-1)
        return multiply(F.silu(gate) * up, w2, rule)

    weights, ids, _ = dispatch_output.topk_output
    total = sum_local_experts(
        dispatch_output.hidden_states, weights, ids, len(layer.w13_weight), compute
    )
    return StandardCombineInput(hidden_states=total)
