"""The routes of boxes: inside the slot, inside the node, or over the fabric to a node and then inside it.

A flow is the intersection of a wanted shard and a held box. Its routes depend only on the members of the parts that
hold the box (replicas), the members of the part that wants it (also replicas), and earlier flows of this pair. So every
member of the pair computes the same routes without knowing the rest of the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megarl.resharding.shards import (
    FP8,
    Box,
    LayoutError,
    Part,
    Shard,
    box_area,
    intersect_boxes,
    overlap,
)

SEND_STAGES = 4  # phases of sending, where there are several nodes
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}


def item_bytes(dtype: str) -> int:
    """The bytes of an element of a data type, by torch's name."""
    return _ITEM_BYTES[dtype]


class ReplicaSet(NamedTuple):
    """A box of a tensor that all of `parts` hold; shards[i] is the shard of parts[i]."""

    box: Box
    parts: tuple[int, ...]
    shards: tuple[Shard, ...]
    send_stage: int


class TensorReplicas(NamedTuple):
    """The holdings of one logical tensor. pattern: tensors of one number have equal boxes, as layers of one kind do."""

    replica_sets: tuple[ReplicaSet, ...]
    pattern: int


class Flow(NamedTuple):
    """The box of `wanted`, a shard of target part number `target`, that comes from `held`; num_bytes: on the wire."""

    box: Box
    dtype: str
    num_bytes: int
    held: ReplicaSet
    wanted: Shard
    target: int


class Transfer(NamedTuple):
    """A copy of a flow from member `source`, which has it in `shard`, to member `target`; may be the same member.

    forwarded: `shard` is the wanted shard of the source, written a send stage earlier.
    """

    source: int
    target: int
    shard: Shard
    forwarded: bool


class LoadBalancer:
    """Balances load over `members`; offset: the member that comes first among equally loaded ones."""

    def __init__(self, members: Sequence[int], offset: int) -> None:
        first = offset % len(members)
        self.members = (*members[first:], *members[:first])
        self.loads = [0] * len(members)

    def least_loaded(self, num_bytes: int) -> int:
        """The least loaded member."""
        return self._load(self.loads.index(min(self.loads)), num_bytes)

    def preferred(self, caller: int, num_bytes: int) -> int:
        """A fixed member for each caller, which makes few, long streams; the least loaded when it has too much more."""
        index = caller % len(self.loads)
        if self.loads[index] > min(self.loads) + num_bytes:
            return self.least_loaded(num_bytes)
        return self._load(index, num_bytes)

    def _load(self, index: int, num_bytes: int) -> int:
        self.loads[index] += num_bytes
        return self.members[index]


class Pair:
    """The members that hold the same boxes, the members that want the same shards, and the load of each so far."""

    def __init__(
        self, holders: dict[int, int], receivers: Sequence[int], gpus_per_node: int, offset: int
    ) -> None:
        """holders: member -> index of its shard in a holding."""
        self.holders = holders
        self.local = [member for member in receivers if member in holders]
        self.senders = LoadBalancer(sorted(holders), offset)
        replica_nodes = _by_node(sorted(holders), gpus_per_node)
        lacking_nodes = _by_node(
            [member for member in receivers if member not in holders], gpus_per_node
        )
        self.near: dict[int, tuple[LoadBalancer, list[int]]] = {}
        self.far: dict[int, LoadBalancer] = {}
        for node, lacking in lacking_nodes.items():
            if node in replica_nodes:
                self.near[node] = LoadBalancer(replica_nodes[node], offset), lacking
            else:
                self.far[node] = LoadBalancer(lacking, offset)

    def transfers(self, flow: Flow, node: int | None = None) -> Iterator[Transfer]:
        """The transfers by which every receiver gets the flow. node: leave out transfers inside other nodes.

        Call it, and exhaust the iterator, once for each flow of the pair, in order: it updates the loads.
        """
        shards = flow.held.shards
        num_bytes = flow.num_bytes
        wanted = flow.wanted
        for member in self.local:
            yield Transfer(member, member, shards[self.holders[member]], False)
        for place in self.near if node is None else {node} & self.near.keys():
            senders, lacking = self.near[place]
            for index, member in enumerate(lacking):
                source = senders.preferred(index, num_bytes)
                yield Transfer(source, member, shards[self.holders[source]], False)
        for index, (place, lacking) in enumerate(self.far.items()):
            source = self.senders.preferred(index, num_bytes)
            entry = lacking.least_loaded(num_bytes)
            yield Transfer(source, entry, shards[self.holders[source]], False)
            if node is None or node == place:
                for member in lacking.members:
                    if member != entry:
                        yield Transfer(entry, member, wanted, True)


def _by_node(members: Iterable[int], gpus_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for member in members:
        nodes[member // gpus_per_node].append(member)
    return nodes


class RouteChooser:
    """Cuts the target parts into flows, proves that each element has exactly one source, and chooses the transfers."""

    def __init__(
        self,
        sources: Sequence[Part],
        targets: Sequence[Part],
        num_members: int,
        *,
        gpus_per_node: int,
        dtype: str,
    ) -> None:
        """dtype: torch's name of the model's data type."""
        self.sources = sources
        self.targets = targets
        several_nodes = num_members > gpus_per_node
        # with several nodes the last send stage only forwards
        if several_nodes:
            self.num_send_stages = SEND_STAGES + 1
        else:
            self.num_send_stages = 1
        self.gpus_per_node = gpus_per_node
        self.dtype = dtype
        self.patterns: dict[tuple[Box, ...], int] = {}
        self.cuts: dict[tuple[int, Box], list[tuple[int, Box]]] = {}
        self.tensors = self._tensors(SEND_STAGES if several_nodes else 1)
        self.pairs: dict[tuple[tuple[int, ...], int], Pair] = {}

    def _tensors(self, num_send_stages: int) -> dict[str, TensorReplicas]:
        held: dict[str, dict[Box, list[tuple[int, Shard, int]]]] = defaultdict(dict)
        for number, part in enumerate(self.sources):
            total = sum(shard.area for shard in part.shards)
            done = 0
            for shard in part.shards:
                if area := shard.area:
                    send_stage = done * num_send_stages // total
                    held[shard.name].setdefault(shard.box, []).append((number, shard, send_stage))
                    done += area
        replicas_by_name = {}
        for name, boxes in held.items():
            replica_sets = []
            for box, holders in boxes.items():
                numbers, shards, send_stages = zip(*holders, strict=True)
                replica_sets.append(ReplicaSet(box, numbers, shards, send_stages[0]))
            pattern = self.patterns.setdefault(tuple(boxes), len(self.patterns))
            replicas_by_name[name] = TensorReplicas(tuple(replica_sets), pattern)
        return replicas_by_name

    def flows(self, member: int | None = None) -> Iterator[tuple[Flow, Iterator[Transfer]]]:
        """Every flow with its transfers, in the same order on all members; exhaust the transfers of each.

        member: restricts this to flows of the member's pairs, and to transfers that may involve it. Raises LayoutError.
        """
        source_numbers = {
            number
            for number, part in enumerate(self.sources)
            if member is None or member in part.members
        }
        sent = {shard.name for number in source_numbers for shard in self.sources[number].shards}
        if member is None:
            node = None
        else:
            node = member // self.gpus_per_node
        for number, part in enumerate(self.targets):
            wants = member is None or member in part.members
            for wanted in part.shards:
                if not (wants or wanted.name in sent) or not part.members:
                    continue
                for held, box in self._cut(
                    wanted, part.members[0] if member is None else member, wants
                ):
                    if wants or not source_numbers.isdisjoint(held.parts):
                        dtype = wanted.dtype or self.dtype
                        flow = Flow(
                            box, dtype, box_area(box) * item_bytes(dtype), held, wanted, number
                        )
                        yield flow, self._pair(held.parts, number).transfers(flow, node)

    def _pair(self, parts: tuple[int, ...], target: int) -> Pair:
        key = parts, target
        if key not in self.pairs:
            holders: dict[int, int] = {}
            for index, number in enumerate(parts):
                for member in self.sources[number].members:
                    holders.setdefault(member, index)
            # neighbouring pairs start with different members
            offset = parts[0] // len(parts) + target
            self.pairs[key] = Pair(
                holders, self.targets[target].members, self.gpus_per_node, offset
            )
        return self.pairs[key]

    def _cut(self, wanted: Shard, member: int, complete: bool) -> list[tuple[ReplicaSet, Box]]:
        """The holdings that intersect a wanted shard; complete: prove that each of its elements is in exactly one."""
        tensor = self.tensors.get(wanted.name, TensorReplicas((), -1))
        key = tensor.pattern, wanted.box
        if key not in self.cuts:
            boxes = [held.box for held in tensor.replica_sets]
            if common := overlap(boxes):
                problem = "source boxes overlap without being replicas"
                overlapping = " and ".join(map(describe_box, common))
                raise LayoutError(f"{wanted.name}: {problem}: {overlapping}")
            meeting = [(index, intersect_boxes(box, wanted.box)) for index, box in enumerate(boxes)]
            self.cuts[key] = [(index, box) for index, box in meeting if box]
        intersections = self.cuts[key]
        held_area = sum(box_area(box) for _, box in intersections)
        if complete and held_area != wanted.area:
            box = describe_box(wanted.box)
            part = f"of which the sources hold {held_area} of {wanted.area} elements"
            raise LayoutError(f"{wanted.name}: member {member} wants {box}, {part}")
        return [(tensor.replica_sets[index], box) for index, box in intersections]


def describe_box(box: Box) -> str:
    """A box as text for an error message."""
    items, rows, cols = ("{}:{}".format(*side) for side in box)
    return f"rows {rows}, columns {cols}" + (f" of items {items}" if box[0] != (0, 1) else "")
