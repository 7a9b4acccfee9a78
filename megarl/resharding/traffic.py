"""The bytes that an exchange moves, by member and by link, computed without the members' plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.resharding.reshard_plan import granule_bytes
from megarl.resharding.routes import Flow, RouteChooser
from megarl.resharding.shards import Box, Part
from megarl.types import IntArray


@dataclass(frozen=True)
class Traffic:
    """Bytes [num_members]: dest, of the target shards; local, copied inside the slot; node, inside nodes; fabric,
    between nodes.

    minimum_wire [num_members]: the lower bound of any plan, the target's bytes that the own slot does not hold.
    minimum_fabric [num_nodes]: the distinct bytes that a node's members want and none of them holds.
    """

    dest: IntArray
    local: IntArray
    node_in: IntArray
    node_out: IntArray
    fabric_in: IntArray
    fabric_out: IntArray
    minimum_wire: IntArray
    minimum_fabric: IntArray

    @property
    def wire_in(self) -> IntArray:
        return self.node_in + self.fabric_in

    @property
    def wire_out(self) -> IntArray:
        return self.node_out + self.fabric_out


def count_traffic(
    sources: Sequence[Part],
    targets: Sequence[Part],
    num_members: int,
    *,
    gpus_per_node: int,
    dtype: str,
) -> Traffic:
    """The bytes of the whole exchange. Arguments and errors as of `plan_streams`."""
    router = RouteChooser(sources, targets, num_members, gpus_per_node=gpus_per_node, dtype=dtype)
    node_in, node_out, fabric_in, fabric_out = ([0] * num_members for _ in range(4))
    needs = _Needs(sources, targets, num_members, gpus_per_node)
    for flow, transfers in router.flows():
        num_bytes = flow.num_bytes
        needs.add(flow)
        for source, target, _, _ in transfers:
            if source // gpus_per_node != target // gpus_per_node:
                fabric_out[source] += num_bytes
                fabric_in[target] += num_bytes
            elif source != target:
                node_out[source] += num_bytes
                node_in[target] += num_bytes
    dest, local, minimum_fabric = needs.totals()
    return Traffic(
        *(np.array(table) for table in (dest, local, node_in, node_out, fabric_in, fabric_out)),
        minimum_wire=np.array(dest) - np.array(local),
        minimum_fabric=np.array(minimum_fabric),
    )


def least_round_bytes(
    sources: Sequence[Part],
    targets: Sequence[Part],
    num_members: int,
    *,
    gpus_per_node: int,
    dtype: str,
) -> int:
    """The largest `Streams.least_round_bytes` of any member, computed without the streams."""
    router = RouteChooser(sources, targets, num_members, gpus_per_node=gpus_per_node, dtype=dtype)
    # granule by send stage, source and target
    largest: dict[tuple[int, int, int], int] = defaultdict(int)
    for flow, transfers in router.flows():
        num_bytes = granule_bytes(flow.box, flow.dtype)
        for source, target, _, forwarded in transfers:
            key = flow.held.send_stage + forwarded, source, target
            if source != target and largest[key] < num_bytes:
                largest[key] = num_bytes
    of_member = np.zeros((router.num_send_stages, num_members), np.int64)
    for (send_stage, source, target), num_bytes in largest.items():
        of_member[send_stage, source] += num_bytes
        of_member[send_stage, target] += num_bytes
    return 2 * int(of_member.max(initial=0))


class _Needs:
    """The bytes that must move whatever the routes are, computed from the members of the parts alone."""

    def __init__(
        self, sources: Sequence[Part], targets: Sequence[Part], num_members: int, gpus_per_node: int
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.num_members = num_members
        self.gpus_per_node = gpus_per_node
        self.pair_bytes: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        # nodes that want a box and lack it
        self.lacking: dict[tuple[tuple[int, ...], int], frozenset[int]] = {}
        self.boxes: dict[tuple[str, Box], tuple[frozenset[int], int]] = {}

    def add(self, flow: Flow) -> None:
        pair = flow.held.parts, flow.target
        if pair not in self.lacking:
            replica_set = {
                member // self.gpus_per_node for member in self._holders(flow.held.parts)
            }
            wanting = {member // self.gpus_per_node for member in self.targets[flow.target].members}
            self.lacking[pair] = frozenset(wanting - replica_set)
        self.pair_bytes[pair] += flow.num_bytes
        key = flow.wanted.name, flow.box
        if key in self.boxes:
            nodes = self.lacking[pair] | self.boxes[key][0]
        else:
            nodes = self.lacking[pair]
        self.boxes[key] = nodes, flow.num_bytes

    def totals(self) -> tuple[list[int], list[int], list[int]]:
        """(bytes that each member wants, bytes of them in its own slot, distinct bytes that each node lacks)."""
        dest = [0] * self.num_members
        local = [0] * self.num_members
        for (parts, target), num_bytes in self.pair_bytes.items():
            holders = self._holders(parts)
            for member in self.targets[target].members:
                dest[member] += num_bytes
                local[member] += num_bytes if member in holders else 0
        fabric = [0] * -(-self.num_members // self.gpus_per_node)
        for nodes, num_bytes in self.boxes.values():
            for node in nodes:
                fabric[node] += num_bytes
        return dest, local, fabric

    def _holders(self, parts: tuple[int, ...]) -> set[int]:
        return {member for part in parts for member in self.sources[part].members}
