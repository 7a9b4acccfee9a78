"""Plans carried out on integers, without processes: each element of a logical tensor is a number of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.model.tensors import STACK, Size
from megarl.resharding.reshard_plan import Copy, MemberPlan, Round, Streams, plan_streams
from megarl.resharding.shards import Box, Cell, Part, Shard, param_table
from megarl.resharding.traffic import Traffic
from megarl.types import IntArray

EMPTY = -1
Memory = dict[str, IntArray]


def into_nodes(traffic: Traffic, gpus_per_node: int) -> list[int]:
    """Bytes that enter each node over the fabric."""
    return np.add.reduceat(
        traffic.fabric_in, range(0, len(traffic.fabric_in), gpus_per_node)
    ).tolist()


class World:
    """The parameters of both sides of every member. Targets start empty."""

    def __init__(self, sources: Sequence[Part], targets: Sequence[Part], num_members: int) -> None:
        extents: dict[str, Size] = {}
        for shard in (shard for part in (*sources, *targets) for shard in part.shards):
            sizes = zip(extents.get(shard.name, (0, 0, 0)), shard.box, strict=True)
            extents[shard.name] = tuple(max(size, side[1]) for size, side in sizes)  # pyright: ignore
        self.values: dict[str, IntArray] = {}
        start = 0
        for name, size in extents.items():
            self.values[name] = np.arange(start, start + np.prod(size)).reshape(size)
            start += self.values[name].size
        self.sources = [self._filled(shards_of(sources, member)) for member in range(num_members)]
        self.expected = [self._filled(shards_of(targets, member)) for member in range(num_members)]
        self.targets = [
            {name: np.full_like(array, EMPTY) for name, array in params.items()}
            for params in self.expected
        ]

    def _filled(self, shards: Sequence[Shard]) -> Memory:
        params = {name: np.full(size, EMPTY) for name, size in param_table(shards).items()}
        for shard in shards:
            scatter(params, shard.param, shard.at, self.block(shard.name, shard.box))
        return params

    def block(self, name: str, box: Box) -> IntArray:
        return self.values[name][tuple(slice(*side) for side in box)]

    def run(self, plans: Sequence[MemberPlan]) -> None:
        """All members, round by round, as late as an executor may write: a round is packed before the round before it
        is written, unless it begins a send stage."""
        for plan in plans:
            for copy in plan.local:
                self._write(copy, self._read(copy))
        arrived: list[tuple[Copy, IntArray]] = []
        for index in range(len(plans[0].rounds)):
            if index in plans[0].send_stage_starts:
                arrived = self._settle(arrived)
            packed = [
                (copy, self._read(copy)) for plan in plans for copy in plan.rounds[index].sends
            ]
            self._settle(arrived)
            arrived = packed
        self._settle(arrived)

    def _settle(self, arrived: list[tuple[Copy, IntArray]]) -> list[tuple[Copy, IntArray]]:
        for copy, block in arrived:
            self._write(copy, block)
        return []

    def _read(self, copy: Copy) -> IntArray:
        params = (self.targets if copy.forwarded else self.sources)[copy.source]
        block = gather(params, copy.source_param, copy.source_at, copy.size)
        assert (block == self.block(copy.name, copy.box)).all(), f"{copy} reads what is not there"
        return block

    def _write(self, copy: Copy, block: IntArray) -> None:
        params = self.targets[copy.target]
        before = gather(params, copy.target_param, copy.target_at, copy.size)
        assert (before == EMPTY).all(), f"{copy} writes a second time"
        scatter(params, copy.target_param, copy.target_at, block)

    def check(self) -> None:
        """Every target element has its own value."""
        for member, (got, expected) in enumerate(zip(self.targets, self.expected, strict=True)):
            for name in expected:
                assert (got[name] == expected[name]).all(), f"{name} of member {member}"


def shards_of(parts: Sequence[Part], member: int) -> list[Shard]:
    return [shard for part in parts if member in part.members for shard in part.shards]


def gather(params: Memory, param: str, at: Cell, size: Size) -> IntArray:
    (item, row, col), (items, rows, cols) = at, size
    plane = slice(row, row + rows), slice(col, col + cols)
    if STACK in param:
        arrays = [params[param.format(number)] for number in range(item, item + items)]
        return np.concatenate([array[(slice(0, 1), *plane)] for array in arrays])
    return params[param][(slice(item, item + items), *plane)].copy()


def scatter(params: Memory, param: str, at: Cell, block: IntArray) -> None:
    (item, row, col), (items, rows, cols) = at, block.shape
    plane = slice(row, row + rows), slice(col, col + cols)
    for number in range(items):
        by_item = STACK in param
        array, index = (
            (params[param.format(item + number)], 0) if by_item else (params[param], item + number)
        )
        array[(index, *plane)] = block[number]


def all_streams(
    sources: Sequence[Part], targets: Sequence[Part], num_members: int, gpus_per_node: int
) -> list[Streams]:
    return [
        plan_streams(
            sources, targets, member, num_members, gpus_per_node=gpus_per_node, dtype="bfloat16"
        )
        for member in range(num_members)
    ]


def all_plans(streams: Sequence[Streams], round_bytes: int) -> list[MemberPlan]:
    """As the members do it: with the largest number of rounds of anyone."""
    needed = [of_member.rounds_needed(round_bytes) for of_member in streams]
    num_rounds = [max(numbers) for numbers in zip(*needed, strict=True)]
    return [of_member.assign(num_rounds) for of_member in streams]


def round_bytes_of(step: Round) -> int:
    return sum(copy.num_bytes for copy in (*step.sends, *step.receives))
