"""The kernels of transformer_engine_torch that training without fp8 calls, in plain torch.

Their signatures are those of TransformerEngine 2.14.1, whose own Python calls them. Attention is replaced as a whole
module, context parallelism included: TransformerEngine's choice of a backend and its ring are not run.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()


def _product(a: Tensor, is_a_transposed: bool, b: Tensor, is_b_transposed: bool) -> Tensor:
    """cuBLAS's columns are torch's rows: the result is op(b) op(a), in float32."""
    left, right = b.reshape(-1, b.shape[-1]).float(), a.reshape(-1, a.shape[-1]).float()
    return (left.t() if is_b_transposed else left) @ (right.t() if is_a_transposed else right)


def generic_gemm(
    A: Tensor, transa: bool, B: Tensor, transb: bool, D: Tensor | None, quantizer: Any, out_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, *_: Any, alpha: float = 1.0, beta: float | None = None, **__: Any,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    assert quantizer is None and not gelu and alpha == 1.0
    product = _product(A, transa, B, transb)
    if bias is not None and bias.numel() and not grad:
        product = product + bias.float()
    if D is not None:
        D.copy_(product + D.float() if accumulate else product)
        return D, None, None, None
    typed = product.to(A.dtype if out_dtype is None else _torch_type(out_dtype))
    return (typed if transb else typed.reshape(*B.shape[:-1], typed.shape[-1])), None, None, None


def te_general_grouped_gemm(
    A: Sequence[Tensor], transa: bool, B: Sequence[Tensor], transb: bool, D: Sequence[Tensor], D_type: Any,
    m_splits: Sequence[int], bias: Any, bias_type: Any, single_output: bool, pre_gelu: Any, grad: bool,
    workspace: Any, workspace_size: int, accumulate: bool, use_split_accumulator: bool, sm_count: int,
) -> Any:  # fmt: skip
    start = 0
    for number, (a, b) in enumerate(zip(A, B, strict=True)):
        product = _product(a, transa, b, transb)
        if single_output:
            end = start + m_splits[number]
            D[0][start:end].copy_(product)
            start = end
        else:
            D[number].copy_(product + D[number].float() if accumulate else product)
    return bias


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    kind: Any,
    sm: int,
    is_centred: bool,
) -> tuple[Tensor, None, Tensor]:
    rsigma = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
    normed = (x.float() * rsigma[..., None] * (weight.float() + is_centred)).to(x.dtype)
    return (normed if out is None else out.copy_(normed)), None, rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm: int, is_centred: bool
) -> tuple[Tensor, Tensor]:
    gradient = dy.float() * (weight.float() + is_centred)
    normed = x.float() * rsigma[..., None]
    dx = (gradient - normed * (gradient * normed).mean(-1, keepdim=True)) * rsigma[..., None]
    return dx.to(x.dtype), (dy.float() * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def multi_tensor_adam(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float,
    eps: float, step: int, mode: int, is_corrected: bool, weight_decay: float,
) -> None:  # fmt: skip
    """AdamW (mode 1) on lists of gradients, weights and both moments."""
    assert mode == 1
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if is_corrected else (1.0, 1.0)
    for gradient, weight, mean, square in zip(*lists, strict=True):
        mean.mul_(beta1).add_(gradient.float(), alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        update = (mean / correction1) / ((square / correction2).sqrt() + eps)
        weight.copy_(weight.float() - lr * (update + weight_decay * weight.float()))


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = [tensor.float().norm() for tensor in lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(1, device="cuda")
    return each.norm().reshape(1), each if per_tensor else torch.empty(0, device="cuda")


def multi_tensor_scale(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def fused_rope_backward(*given: Any) -> Tensor:
    return fused_rope_forward(*given, is_backward=True)


def fused_rope_forward(
    t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, bounds: Tensor, cp: int, rank: int,
    is_backward: bool = False,
) -> Tensor:  # fmt: skip
    """Of packed segments [T, heads, d], whose bounds are those of all context-parallel ranks together."""
    from megarl.parallel.packing import zigzag

    assert not interleaved
    ends, width = bounds.cpu().numpy(), freqs.shape[-1]
    starts = torch.from_numpy(ends[:-1].repeat(ends[1:] - ends[:-1]))
    places = torch.from_numpy(zigzag(ends, cp, rank))
    angle = freqs[(places - starts[places]).to(t.device), 0, 0].float()[:, None, :]
    x, unturned = t[..., :width].float(), t[..., width:]
    half = width // 2
    if is_backward:
        sine = x * angle.sin()
        turned = torch.cat([sine[..., half:], -sine[..., :half]], -1)
    else:
        turned = torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()
    return torch.cat([(x * angle.cos() + turned).to(t.dtype), unturned], -1)


def attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, qkv_format: str = "",
    cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None,
    attn_mask_type: str = "", **others: Any,
) -> Tensor:  # fmt: skip
    """DotProductAttention.forward for packed segments, by megarl's attention for layers without TransformerEngine."""
    from megarl.parallel.groups import cp_group
    from megarl.parallel.local_spec import PackedAttention
    from megarl.parallel.shared_rows import RowParams

    CALLS["attention"] += 1
    assert qkv_format == "thd" and "padding_causal" in attn_mask_type, (qkv_format, attn_mask_type)
    for bounds in (cu_seqlens_q, cu_seqlens_kv):
        assert bounds.dtype == torch.int32 and bounds.is_cuda
    assert max_seqlen_q == max_seqlen_kv >= (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max().item()
    packed = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(packed)
    packed.softmax_scale, packed.group = (
        self.fused_attention.softmax_scale,
        self.cp_group or cp_group(1),
    )
    row = RowParams(cu_seqlens_q=cu_seqlens_q)
    return packed(query, key, value, None, packed_seq_params=row)


def _torch_type(kind: Any) -> torch.dtype:
    types = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    return {engine: torch_type for torch_type, engine in types.items()}[kind]


def _counted(kernel: Any) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        CALLS[kernel.__name__] += 1
        return kernel(*args, **kwargs)

    return counting


KERNELS = (
    generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, multi_tensor_adam, multi_tensor_l2norm,
    multi_tensor_scale, fused_rope_forward, fused_rope_backward,
)  # fmt: skip


def install() -> None:
    """Replace the kernels in every module that has imported them; call it after all imports."""
    te = importlib.import_module("transformer_engine.pytorch")
    tex = importlib.import_module("transformer_engine_torch")

    replaced = {id(getattr(tex, kernel.__name__)): _counted(kernel) for kernel in KERNELS}
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(("transformer_engine", "megatron")):
            for key, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, key, replaced[id(value)])
    te.DotProductAttention.forward = attention
