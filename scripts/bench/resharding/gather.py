"""The gather-everything exchange, as slime and verl arrange it, made as fast as that design goes on gloo.

For one bucket of parameters after another: the pipeline stage that holds them broadcasts its shards to its peers in the
other stages; expert shards are then all-gathered over the expert-parallel group and the other cut ones over the
tensor-parallel group; every rank, now with whole tensors, loads what its engine rank wants of them.

Kinder than the originals: no whole tensor is concatenated or renamed, slices go from the bucket straight into the
engine's parameters; loading overlaps the next bucket's broadcast; the all-gathers are direct sends into place, because
gloo's own copies everything twice and takes twice as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.model.tensors import STACK, Size
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.shards import Cell, Shard, box_size, intersect_boxes, param_table, views

from .case import Case, Params
from .groups import axis_group, axis_ranks


class Slice(NamedTuple):
    """What is loaded from one parameter of one row of a bucket."""

    row: int
    param: str
    at: Cell
    size: Size
    into: list[torch.Tensor]


class Bucket(NamedTuple):
    """Parameters of one stage that are gathered alike. members: whose shards the rows of its buffer are."""

    holder: int  # the rank of that stage in this rank's pipeline
    axis: str  # "": nothing to gather
    members: tuple[int, ...]
    sizes: dict[str, Size]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.members), sum(map(math.prod, self.sizes.values()))

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """[members, elements] of a flat buffer."""
        return buffer[: math.prod(self.shape)].view(self.shape)

    def params(self, row: torch.Tensor) -> Params:
        """The parameters inside one row."""
        parts = row.split([math.prod(size) for size in self.sizes.values()])
        return {
            name: part.view(size)
            for (name, size), part in zip(self.sizes.items(), parts, strict=True)
        }


def one_by_one(shards: Sequence[Shard]) -> Iterator[Shard]:
    """The same shards, with one for each parameter."""
    for shard in shards:
        if STACK not in shard.param:
            yield shard
            continue
        (number, row, col), item = shard.at, shard.items[0]
        for index in range(shard.size[0]):
            items, param = (item + index, item + index + 1), shard.param.format(number + index)
            yield shard._replace(items=items, param=param, at=(0, row, col))


class Gather:
    """One rank's side, for training layouts with ETP 1."""

    def __init__(
        self, case: Case, rank: int, sources: Params, targets: Params, bucket_bytes: int
    ) -> None:
        assert case.train.etp == 1
        self._case, self._rank, self._sources, self._targets = case, rank, sources, targets
        self._bucket_elements = bucket_bytes // torch.bfloat16.itemsize
        self._groups = {axis: axis_group(case.train, axis) for axis in ("pp", "tp", "ep")}

    def plan(self) -> None:
        """Choose the buckets, and what is loaded from each."""
        engine = self._case.engine.member(self._rank)
        assert engine is not None
        targets_by_name: dict[str, list[Shard]] = defaultdict(list)
        for shard in sglang_map.shards(self._case.shape, self._case.engine, engine[1]):
            targets_by_name[shard.name].append(shard)
        self._buckets: list[tuple[Bucket, list[Slice]]] = []
        for holder in axis_ranks(self._case.train, self._rank, "pp"):
            held = self._held_in_stage(holder)
            for bucket in self._stage_buckets(holder, held):
                self._buckets.append((bucket, self._slices(bucket, held, targets_by_name)))

    @torch.no_grad()
    def run(self) -> None:
        """Fill the targets. Two buffers, each as large as the largest bucket."""
        longest = max(math.prod(bucket.shape) for bucket, _ in self._buckets)
        buffers = [torch.empty(longest, dtype=torch.bfloat16) for _ in range(2)]
        gathering: list[dist.Work] = []
        for index, (bucket, _) in enumerate(self._buckets):
            broadcast = self._broadcast(bucket, bucket.rows(buffers[index % 2]))
            if index:
                self._load(index - 1, gathering, buffers[(index - 1) % 2])
            broadcast.wait()
            gathering = self._all_gather(bucket, bucket.rows(buffers[index % 2]))
        last = len(self._buckets) - 1
        self._load(last, gathering, buffers[last % 2])

    def _broadcast(self, bucket: Bucket, rows: torch.Tensor) -> dist.Work:
        holder_row = rows[bucket.members.index(bucket.holder)]
        if bucket.holder == self._rank:
            held = [self._sources[param].view(size) for param, size in bucket.sizes.items()]
            torch._foreach_copy_(list(bucket.params(holder_row).values()), held)  # pyright: ignore[reportPrivateImportUsage]
        return dist.broadcast(holder_row, bucket.holder, self._groups["pp"], async_op=True)  # type: ignore[return-value]

    def _all_gather(self, bucket: Bucket, rows: torch.Tensor) -> list[dist.Work]:
        if not bucket.axis:
            return []
        group, number, me = (
            self._groups[bucket.axis],
            len(rows),
            bucket.members.index(bucket.holder),
        )
        works = []
        for step in range(1, number):
            source, target = (me + step) % number, (me - step) % number
            works.append(dist.irecv(rows[source], group=group, group_src=source))
            works.append(dist.isend(rows[me], group=group, group_dst=target))
        return works

    def _load(self, index: int, gathering: Sequence[dist.Work], buffer: torch.Tensor) -> None:
        bucket, slices = self._buckets[index]
        for work in gathering:
            work.wait()
        if not slices:
            return
        params = [bucket.params(row) for row in bucket.rows(buffer)]
        out_of = [
            views(params[piece.row], piece.param, piece.at, piece.size)[0] for piece in slices
        ]
        torch._foreach_copy_([piece.into[0] for piece in slices], out_of)  # pyright: ignore[reportPrivateImportUsage]

    def _held_in_stage(self, holder: int) -> dict[int, dict[str, list[Shard]]]:
        """Rank -> parameter -> shards, of the ranks whose shards of this stage come here."""
        train, shards_by_rank = self._case.train, {}
        for rank in {*axis_ranks(train, holder, "tp"), *axis_ranks(train, holder, "ep")}:
            shards_by_rank[rank] = by_param = defaultdict(list)
            for shard in one_by_one(megatron_map.shards(self._case.shape, train, rank, True)):
                by_param[shard.param].append(shard)
        return shards_by_rank

    def _stage_buckets(
        self, holder: int, held: Mapping[int, Mapping[str, list[Shard]]]
    ) -> Iterator[Bucket]:
        tp_ranks, ep_ranks = (axis_ranks(self._case.train, holder, axis) for axis in ("tp", "ep"))
        for wanted_axis, members in (("tp", tp_ranks), ("ep", ep_ranks), ("", (holder,))):
            bucket = Bucket(holder, wanted_axis, members, {})
            for param, shards in held[holder].items():
                is_cut = held[tp_ranks[0]][param] != held[tp_ranks[-1]][param]
                axis = "ep" if ".experts." in param else "tp" if is_cut else ""
                if axis != bucket.axis:
                    continue
                size = param_table(shards)[param]
                filled = math.prod(bucket.shape) + math.prod(size) * len(bucket.members)
                if bucket.sizes and filled > self._bucket_elements:
                    yield bucket
                    bucket = bucket._replace(sizes={})
                bucket.sizes[param] = size
            if bucket.sizes:
                yield bucket

    def _slices(
        self,
        bucket: Bucket,
        held: Mapping[int, Mapping[str, list[Shard]]],
        targets_by_name: Mapping[str, list[Shard]],
    ) -> list[Slice]:
        slices = []
        for row, member in enumerate(bucket.members):
            for source in (shard for param in bucket.sizes for shard in held[member][param]):
                for target in targets_by_name[source.name]:
                    box = intersect_boxes(source.box, target.box)
                    if box:
                        size, into = box_size(box), target.cell(box)
                        place = views(self._targets, target.param, into, size)
                        slices.append(Slice(row, source.param, source.cell(box), size, place))
        return slices
