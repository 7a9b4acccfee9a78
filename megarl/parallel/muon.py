"""Muon for the matrices of linear layers and AdamW for everything else, in Megatron's distributed optimizer.

Masters and momentum are flat shards over the data-parallel ranks, as AdamW's are; only for a step are matrices whole
(matrix_exchange.py). A step on a matrix is torch.optim.Muon's with Nesterov momentum and `match_rms_adamw`, so that
learning rate and weight decay are those of AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.matrix_exchange import MatrixExchange, MatrixPart, OwnPiece, own_pieces
from megarl.parallel.newton_schulz import MOMENTUM, orthogonalised, update_scale
from megarl.parallel.shard_ranges import shard_ranges, stepped

MOMENTUM_STATE = "momentum"  # of a matrix, in the optimizer and in checkpoints


class Muon(torch.optim.AdamW):
    """Steps on flat shards: those of matrices by Muon, the others as AdamW. Every rank of the stage steps together."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        pieces: Sequence[OwnPiece],
        replica: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        """pieces, replica, group: of `MatrixExchange`. dtype: in which matrices are sent and made orthogonal."""
        # the constructor refuses shards that are views of parameters
        super().__init__([torch.nn.Parameter(torch.empty(0))])
        for each in groups:
            for key, value in self.defaults.items():
                each.setdefault(key, value)
        self.param_groups = [*groups]
        self._dtype = dtype
        self._matrix_shards = {piece.shard for piece in pieces}
        self._exchange = MatrixExchange(pieces, replica, group)

    def is_matrix(self, shard: Tensor) -> bool:
        """Whether Muon steps on this shard; its state is MOMENTUM_STATE alone."""
        return shard in self._matrix_shards

    def start_state(self) -> None:
        """Make the state of every shard, before its first step."""
        for shard in (shard for group in self.param_groups for shard in group["params"]):
            if self.state[shard]:
                continue
            if self.is_matrix(shard):
                self.state[shard] = {MOMENTUM_STATE: torch.zeros_like(shard)}
            else:
                moments = {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
                self.state[shard] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step with each shard's `grad`."""
        self.start_state()
        groups = self.param_groups
        rates: dict[Tensor, float] = {}
        for group in groups:
            for shard in filter(self.is_matrix, group["params"]):
                rates[shard] = group["lr"]
                self.state[shard][MOMENTUM_STATE].lerp_(shard.grad, 1 - MOMENTUM)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
        self.param_groups = [group | {"params": self._others(group)} for group in groups]
        try:
            super().step()
        finally:
            self.param_groups = groups

        def nesterov(piece: OwnPiece) -> Tensor:
            momentum = piece.of(self.state[piece.shard][MOMENTUM_STATE])
            assert piece.shard.grad is not None
            return piece.of(piece.shard.grad).lerp(momentum, MOMENTUM)

        def take(piece: OwnPiece, update: Tensor) -> None:
            scale = rates[piece.shard] * update_scale(piece.part.rows, piece.part.cols)
            piece.of(piece.shard).add_(update, alpha=-scale)

        self._exchange.run(nesterov, orthogonalised, take, self._dtype)

    def _others(self, group: Mapping[str, Any]) -> list[Tensor]:
        return [shard for shard in group["params"] if not self.is_matrix(shard)]


def use_muon(
    chained: Any,
    params: Mapping[str, Tensor],
    parts: Sequence[MatrixPart],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> None:
    """Give one of Megatron's DistributedOptimizers Muon in place of its AdamW; on all ranks of the stage together.

    params: the rank's by the map's names. parts: of all of them. Those on which this optimizer does not step here are
    passed over.
    """
    ranges = shard_ranges(chained)
    pieces = []
    for part in parts:
        param = params[part.param]
        if param in ranges:
            shard = stepped(chained, param)
            pieces += own_pieces(part, param.shape[-1], shard, *ranges[param])
    replica = min(dist.get_process_group_ranks(chained.data_parallel_group))
    groups = chained.optimizer.param_groups
    chained.optimizer = Muon(groups, pieces, replica, group, dtype)
