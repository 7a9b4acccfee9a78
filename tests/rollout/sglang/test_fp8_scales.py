"""What SGLang's quantisers are asked for; their kernels run on GPUs alone (tests/end_to_end/test_one_gpu.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.cpu import sglang_patches
from megarl.rollout.sglang.fp8_scales import round_scales_up


class _Buffer:
    """Stands for DeepEP's, which needs GPUs."""

    def low_latency_dispatch(self, *args: Any, **options: Any) -> Any:
        return args, options


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether kernels were asked for powers of two, after the patch; what it replaces is put back."""
    with sglang_patches.quiet_import():
        sglang_patches.prepare()
        from sglang.kernels.ops.moe import ep_moe_kernels
        from sglang.kernels.ops.quantization import fp8_kernel
        from sglang.srt.layers.moe.moe_runner import deep_gemm
        from sglang.srt.layers.moe.token_dispatcher import deepep

    flags = []

    def kernel(*args: Any, scale_ue8m0: bool, **_: Any) -> None:
        flags.append(scale_ue8m0)
        args[2].fill_(2.0)

    def plain_rows(*_: Any) -> None:
        flags.append(False)

    monkeypatch.setattr(fp8_kernel, "_run_per_token_group_quant_8bit_kernel", kernel)
    monkeypatch.setattr(fp8_kernel, "sglang_per_token_quant_fp8", plain_rows)
    monkeypatch.setattr(ep_moe_kernels, "silu_and_mul_masked_post_quant_fwd", kernel)
    monkeypatch.setattr(deep_gemm, "per_token_group_quant", deep_gemm.per_token_group_quant)
    monkeypatch.setattr(deepep, "use_deepep", True)
    monkeypatch.setattr(deepep, "Buffer", type("Buffer", (_Buffer,), {}), raising=False)
    round_scales_up()
    return flags


def test_groups_of_a_token_have_rounded_scales_in_the_layout_of_products(asked: list[bool]) -> None:
    from sglang.kernels.ops.quantization import fp8_kernel

    _, scales = fp8_kernel.sglang_per_token_group_quant_fp8(
        torch.ones(3, 256), 128, column_major_scales=True
    )
    assert asked == [True]
    assert scales.shape == (3, 2)
    assert scales.stride(0) == 1
    assert (scales == 2.0).all()


def test_rows_of_one_group_have_rounded_scales(asked: list[bool]) -> None:
    """Which SGLang gives to another kernel, as it does with longer rows that have one scale."""
    from sglang.kernels.ops.quantization import fp8_kernel

    codes, scales = fp8_kernel.sglang_per_token_group_quant_fp8(torch.ones(3, 128), 128)
    assert asked == [True]
    assert codes.shape == (3, 128)
    assert scales.shape == (3, 1)
    fp8_kernel.sglang_per_token_quant_fp8(torch.ones(3, 256))
    assert asked == [True, False]


def test_experts_behind_deepep_have_rounded_scales(asked: list[bool]) -> None:
    """By the function of SGLang that asks for them."""
    from sglang.srt.layers.moe.moe_runner import deep_gemm

    gate_up_ETF = torch.zeros(2, 5, 512)
    codes, scales = deep_gemm._varlen_deep_gemm_silu_mul_quant(
        gate_up_ETF, masked_m=torch.tensor([5, 1]), group_size=128, topk=2
    )
    assert asked == [True]
    assert codes.shape == (2, 5, 256)
    assert scales.shape == (2, 5, 2)


@pytest.mark.parametrize("use_fp8", [True, False])
@pytest.mark.usefixtures("asked")
def test_deepep_sends_rounded_scales(use_fp8: bool) -> None:
    from sglang.srt.layers.moe.token_dispatcher import deepep

    args, options = deepep.Buffer().low_latency_dispatch(
        "tokens", use_fp8=use_fp8, async_finish=True
    )
    assert args == ("tokens",)
    assert options.get("round_scale", False) == use_fp8
    assert options["async_finish"]
