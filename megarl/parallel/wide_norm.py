"""The norm of queries, or of keys, over all heads at once, whose heads are split over tensor-parallel ranks.

Megatron's own norms are of each head (transformer/attention.py). MiniMax-M2's is of the whole projection.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.parallel import groups
from megarl.parallel.split_params import Offsets, split_params


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group, on each rank. Each rank's result depends on it, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class WideNorm(torch.nn.Module):
    """Root-mean-square norm over the heads of all tensor-parallel ranks: [s, b, heads of the rank, d] -> the same.

    The weight has the elements of the rank's heads. The sum of squares is float32's.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int
    ) -> None:
        super().__init__()
        self.eps = eps
        self._group = groups.tp_group()
        self._width = num_heads * hidden_size
        own = self._width // self._group.size()
        self.weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight in a sharded checkpoint."""
        weight: dict[str, Tensor] = {"weight": self.weight}
        return split_params(weight, prefix, sharded_offsets, metadata, self._group)

    def forward(self, heads_SBNH: Tensor) -> Tensor:
        wide = heads_SBNH.flatten(2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self._group.size() > 1:
            squares = _SumOverRanks.apply(squares, self._group)
        normed = wide * torch.rsqrt(squares / self._width + self.eps)
        scaled = normed.to(heads_SBNH.dtype) * self.weight
        return scaled.view_as(heads_SBNH)


def use_wide_norms(config: TransformerConfig, layer_specs: list[ModuleSpec]) -> None:
    """Give the layers of these specs norms over all heads of queries and over all heads of keys."""
    groups_of_heads = config.num_query_groups
    assert groups_of_heads
    for spec in layer_specs:
        attention: Any = spec.submodules.self_attention.submodules  # type: ignore[union-attr]
        attention.q_layernorm = ModuleSpec(
            WideNorm, params={"num_heads": config.num_attention_heads}
        )
        attention.k_layernorm = ModuleSpec(WideNorm, params={"num_heads": groups_of_heads})
