"""Scales of activations in fp8 engines on GPUs, as powers of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def round_scales_up() -> None:
    """Let SGLang's quantiser of activations round scales up to powers of two, as it does with its weights on Blackwell.

    On Hopper `scale_fmt` in `quantization_config` reaches it for tiles of other widths than 128 alone. Its kernel has
    the flag, and stores such scales in float32 row by row; kernels of products want them column by column, so they are
    copied. Run it in a scheduler before the model is built.
    """
    from sglang.kernels.ops.quantization import fp8_kernel

    quantise = fp8_kernel._run_per_token_group_quant_8bit_kernel

    def run(
        x: Tensor, x_q: Tensor, x_s: Tensor, *sizes: Any, scale_ue8m0: bool = False, **options: Any
    ) -> None:
        if scale_ue8m0 or x_s.dtype != torch.float32:
            quantise(x, x_q, x_s, *sizes, scale_ue8m0=scale_ue8m0, **options)
            return
        by_rows = torch.empty(x_s.shape, dtype=x_s.dtype, device=x_s.device)
        quantise(x, x_q, by_rows, *sizes, scale_ue8m0=True, **options)
        x_s.copy_(by_rows)

    fp8_kernel._run_per_token_group_quant_8bit_kernel = run
