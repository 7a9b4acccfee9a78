"""Scales of activations in fp8 engines on GPUs, as powers of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.fp8 import TILE

_LEAST = 1e-10  # SGLang's least of a group's largest magnitude


def round_scales_up() -> None:
    """Let SGLang's quantisers of activations round scales up to powers of two, as they do on Blackwell.

    On Hopper `scale_fmt` in `quantization_config` reaches them for tiles of other widths than 128 alone. Run it in a
    scheduler before the model is built.
    """
    _round_groups()
    _round_masked_experts()
    _round_sent_tokens()


def _round_groups() -> None:
    """In the quantiser of a token's groups of 128 values.

    Its kernel has the flag, and stores such scales in float32 row by row; kernels of products want them column by
    column, so they are copied. Rows of one group have a kernel of their own, which has no flag: they take this one.
    """
    from sglang.kernels.ops.quantization import fp8_kernel

    quantise = fp8_kernel._run_per_token_group_quant_8bit_kernel
    quantise_rows = fp8_kernel.sglang_per_token_quant_fp8

    def run(
        x: Tensor, x_q: Tensor, x_s: Tensor, *sizes: Any, scale_ue8m0: bool = False, **options: Any
    ) -> None:
        if scale_ue8m0 or x_s.dtype != torch.float32:
            quantise(x, x_q, x_s, *sizes, scale_ue8m0=scale_ue8m0, **options)
            return
        by_rows = torch.empty(x_s.shape, dtype=x_s.dtype, device=x_s.device)
        quantise(x, x_q, by_rows, *sizes, scale_ue8m0=True, **options)
        x_s.copy_(by_rows)

    def whole_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
        if x.shape[1] != TILE:
            return quantise_rows(x, dtype)
        codes = torch.empty_like(x, dtype=dtype)
        scales = torch.empty(len(x), 1, device=x.device)
        limits = torch.finfo(dtype)
        sizes = TILE, _LEAST, limits.min, limits.max
        run(x, codes, scales, *sizes, fuse_silu_and_mul=False, masked_m=None)
        return codes, scales

    fp8_kernel._run_per_token_group_quant_8bit_kernel = run
    fp8_kernel.sglang_per_token_quant_fp8 = whole_rows


def _round_masked_experts() -> None:
    """In the activation function of experts whose tokens DeepEP brings in decoding, which quantises what it gives.

    SGLang's kernel for it has powers of two only in Blackwell's format; its Triton kernel has them in float32.
    """
    from sglang.kernels.ops.moe import ep_moe_kernels
    from sglang.srt.layers.moe.moe_runner import deep_gemm

    def quantise(
        gate_up_ETF: Tensor, *, group_size: int, masked_m: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        experts, tokens, both = gate_up_ETF.shape
        width = both // 2
        device = gate_up_ETF.device
        codes = torch.empty(experts, tokens, width, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(experts, tokens, width // group_size, device=device)
        ep_moe_kernels.silu_and_mul_masked_post_quant_fwd(
            gate_up_ETF, codes, scales, group_size, masked_m, scale_ue8m0=True
        )
        return codes, scales

    deep_gemm.per_token_group_quant = quantise


def _round_sent_tokens() -> None:
    """In DeepEP's own kernel, which quantises the tokens that it sends in decoding."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    if not deepep.use_deepep:
        return
    buffer: Any = deepep.Buffer
    send = buffer.low_latency_dispatch

    def dispatch(self: Any, *args: Any, use_fp8: bool = True, **options: Any) -> Any:
        if use_fp8:
            options["round_scale"] = True
        return send(self, *args, use_fp8=use_fp8, **options)

    buffer.low_latency_dispatch = dispatch
