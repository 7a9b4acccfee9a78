"""What is exchanged: a model, its training and engine layouts, and weights whose every value says where it belongs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.shards import Box, Shard, param_table, views

Params = dict[str, torch.Tensor]
DTYPE = "bfloat16"
UNWRITTEN = 0x7FC0  # bits that no weight has: `values` leaves bit 14 clear


@dataclass(frozen=True)
class Case:
    """One exchange between `num_processes` members; members n * gpus_per_node and following make node n."""

    shape: ModelShape
    train: TrainLayout
    engine: EngineLayout
    gpus_per_node: int

    @property
    def num_processes(self) -> int:
        return self.train.world_size

    @property
    def engine_as_megatron(self) -> TrainLayout:
        """The engines' layout where Megatron itself is the engine: its engines are data-parallel replicas."""
        engine = self.engine
        return TrainLayout(
            self.num_processes, tp=engine.tp, pp=1, ep=engine.ep, expert_tp=engine.moe_tp
        )

    def node(self, member: int) -> int:
        return member // self.gpus_per_node


def make_case(
    target: str, num_processes: int, num_nodes: int, num_layers: int, hidden_size: int
) -> Case:
    """TP2 PP2 EP(n/4) training; engines of TP8 ("tp") or of TP4 EP4 ("ep") on the same GPUs."""
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=8192,  # a multiple of every padding, so that all methods move the same rows
        num_experts=32,
        experts_per_token=4,
        moe_ffn_size=256,
    )
    train = TrainLayout(num_processes, tp=2, pp=2, ep=num_processes // 4)
    tp, ep = (8, 1) if target == "tp" else (4, 4)
    return Case(shape, train, EngineLayout(num_processes // tp, tp, ep), num_processes // num_nodes)


def values(name: str, box: Box) -> torch.Tensor:
    """[items, rows, cols] of bfloat16: a hash of the tensor's name and of the element's place in it, as 16 bits."""
    items, rows, cols = (torch.arange(*ends, dtype=torch.int32) for ends in box)
    # wraps, as a hash may
    mixed = items.view(-1, 1, 1) * 73856093 + rows.view(-1, 1) * 19349663 + cols * 83492791
    mixed += zlib.crc32(name.encode()) & 0x7FFFFFFF
    mixed ^= mixed >> 15
    mixed *= 0x2C1B3C6D
    mixed ^= mixed >> 12
    mixed &= 0xBFFF
    return mixed.to(torch.int16).view(torch.bfloat16)


def make_params(shards: Sequence[Shard]) -> Params:
    """Parameters as the shards describe them, with nothing in them."""
    table = param_table(shards)
    sizes = {name: size if size[0] > 1 else size[1:] for name, size in table.items()}
    params = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    forget(params)
    return params


def fill(params: Params, shards: Sequence[Shard]) -> Params:
    """The same parameters, every element with its value."""
    for shard in shards:
        item = shard.items[0]
        for view in views(params, shard.param, shard.at, shard.size):
            for plane in view:
                plane.copy_(values(shard.name, ((item, item + 1), shard.rows, shard.cols))[0])
                item += 1
    return params


def forget(params: Params) -> None:
    """Overwrite every element with what no weight can be, so that an exchange that does nothing is not exact."""
    for param in params.values():
        param.view(torch.int16).fill_(UNWRITTEN)


def is_exact(params: Params, wanted: Params) -> bool:
    """Whether every bit is as wanted."""
    return all(
        torch.equal(params[name].view(torch.int16), wanted[name].view(torch.int16))
        for name in wanted
    )


def num_bytes(sizes: Mapping[str, Sequence[int]]) -> int:
    """Of tensors of these sizes, in the model's type."""
    return sum(math.prod(size) for size in sizes.values()) * torch.bfloat16.itemsize
