"""The attention that stands in for TransformerEngine's, with the arguments of its caller."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.gpu.simulated import kernels

LENGTHS = [3, 5]


class OnGpu(torch.Tensor):
    """Bounds of which the stand-in believes that they are on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_attention_is_that_of_each_segment() -> None:
    inputs = [torch.randn(sum(LENGTHS), 2, 4, dtype=torch.float64) for _ in range(3)]
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32).as_subclass(OnGpu)
    engine = SimpleNamespace(
        fused_attention=SimpleNamespace(softmax_scale=0.5),
        cp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0),
    )
    output = kernels.attention(
        engine,
        *inputs,
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=5,
        max_seqlen_kv=5,
        attn_mask_type="padding_causal",
    )
    segments = zip(*(tensor.transpose(0, 1).split(LENGTHS, 1) for tensor in inputs), strict=True)
    expected = [
        F.scaled_dot_product_attention(*segment, is_causal=True, scale=0.5).transpose(0, 1)
        for segment in segments
    ]
    torch.testing.assert_close(output, torch.cat(expected).flatten(1))
