"""The nodes of a run: which of them each GPU slot is on, which are spare, and which have died."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.topology import bundles_by_address
from megarl.types import UserError

NAME_LABEL = "megarl-node"  # of a Ray node; scripts/ray_node.sh sets it
_PLACING_S = 60.0  # how long to wait for the GPUs of a running cluster
_JOINING_S = 5.0  # the same for a node more, without which the run goes on
_PROBE_S = 3.0  # how long a raylet may take to accept a connection
_PROBES = 32  # at a time
_SILENT_S = (
    5.0  # for which a raylet that accepted none is not asked again: one loss asks several times
)


class NodesLost(Exception):
    """Nodes have died, or another run holds them."""


@dataclass(frozen=True)
class ReservedNode:
    """A node that the run holds.

    address: IPv4; name: Slurm's name of the node, or its host name; port: of its raylet; bundle: its number in the
    placement group. own_group: of a node that was taken later, and can be given back alone.
    """

    node_id: str
    address: str
    name: str
    port: int
    bundle: int
    own_group: PlacementGroup | None = field(default=None, compare=False)

    @staticmethod
    def of(
        node: Mapping[str, Any], bundle: int, own_group: PlacementGroup | None = None
    ) -> ReservedNode:
        """node: an entry of `ray.nodes()`."""
        return ReservedNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            name=node["Labels"].get(NAME_LABEL) or node["NodeManagerHostname"],
            port=node["NodeManagerPort"],
            bundle=bundle,
            own_group=own_group,
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class NodeSlots:
    """The nodes of a run, with `node_gpus` GPU slots each: slot s is on node s // node_gpus of `in_use`.

    Each node, also a spare one, is a bundle of one placement group, with all of the node's GPUs, so that no other run
    takes a spare. When a node dies Ray leaves the other bundles where they are, and moves the lost one to a node that
    joins the cluster later: that is a spare node then. Nodes for further slots (`extend`) are bundles of groups of
    their own, and behind the others.
    """

    def __init__(self, node_gpus: int) -> None:
        self._node_gpus = node_gpus
        self._group: PlacementGroup
        self._replaced: set[str] = set()  # ids of nodes that a spare has replaced, dead or not
        # in the order of the slots: sorted by address, until a spare node replaces one
        self.in_use: list[ReservedNode] = []
        self.died_before: list[ReservedNode] = []  # missing when the others were reserved
        # by node id, when its raylet has not accepted a connection
        self._silent_s: dict[str, float] = {}

    def reserve(self, gpus: int, num_spares: int = 0) -> None:
        """Take the nodes for so many slots, and spare ones; fewer of those where nodes have died.

        Raises UserError where Ray has no such nodes, NodesLost where nodes have died or another run holds them.
        """
        if not (count := -(-gpus // self._node_gpus)):
            return
        num_nodes = self._num_to_reserve(gpus, count, num_spares)
        self._group = placement_group(
            [{"GPU": self._node_gpus}] * num_nodes, strategy="STRICT_SPREAD"
        )
        ready = self._group.ready()
        if not ray.wait([ready], timeout=_PLACING_S)[0]:
            raise NodesLost(
                f"{num_nodes} nodes of the Ray cluster were not free for {_PLACING_S:.0f} s: another run has one"
            )
        ray.get(ready)
        self.in_use = self._reserved()[:count]

    def extend(self, gpus: int) -> int:
        """Take free nodes until there are so many slots, or no node is free; how many slots there are."""
        while len(self.in_use) * self._node_gpus < gpus:
            node = self._one_more()
            if node is None:
                break
            self.in_use.append(node)
        return len(self.in_use) * self._node_gpus

    def _one_more(self) -> ReservedNode | None:
        """A node that this run does not hold yet, perhaps one that has joined the cluster since."""
        held = self._replaced | {node.node_id for node in [*self.in_use, *self._reserved()]}
        others = {
            node["NodeID"]: node
            for node in ray.nodes()
            if node["Alive"]
            and node["Resources"].get("GPU", 0) == self._node_gpus
            and node["NodeID"] not in held
        }
        if not others:
            return None
        group = placement_group([{"GPU": self._node_gpus}])
        if ray.wait([group.ready()], timeout=_JOINING_S)[0]:
            (node_id,) = placement_group_table(group)["bundles_to_node_id"].values()
            if node_id in others:
                return ReservedNode.of(others[node_id], 0, group)
        remove_placement_group(group)
        return None

    def shrink(self, gpus: int) -> None:
        """Give back the nodes that `extend` has taken and that these slots do not need."""
        while (len(self.in_use) - 1) * self._node_gpus >= gpus:
            group = self.in_use[-1].own_group
            if group is None:
                return
            remove_placement_group(group)
            self.in_use.pop()

    def _num_to_reserve(self, gpus: int, count: int, num_spares: int) -> int:
        nodes = ray.nodes()
        num_fit = sum(
            node["Alive"] and node["Resources"].get("GPU", 0) == self._node_gpus for node in nodes
        )
        wanted = count + num_spares
        if num_fit >= wanted:
            return wanted
        key = "placement.gpus" if num_fit < count else "placement.spare_nodes"
        problem = f"{gpus} GPUs are {count} nodes of {self._node_gpus}"
        if num_spares:
            problem += f", with {num_spares} spare {wanted}"
        problem += f", Ray has {num_fit} with as many GPUs"
        self.died_before = [ReservedNode.of(node, -1) for node in nodes if not node["Alive"]]
        if num_fit + len(self.died_before) < wanted:
            hint = "start Ray on more nodes, lower it, or correct placement.gpus_per_node"
            raise UserError(key, problem, hint)
        if num_fit < count:
            raise NodesLost(f"{problem}: other nodes have died")
        return num_fit

    def _reserved(self) -> list[ReservedNode]:
        """The live nodes that hold a bundle, sorted by address."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        node_ids = placement_group_table(self._group)["bundles_to_node_id"]
        of_bundle = {
            bundle: alive[node_id] for bundle, node_id in node_ids.items() if node_id in alive
        }
        addresses = {bundle: node["NodeManagerAddress"] for bundle, node in of_bundle.items()}
        return [
            ReservedNode.of(of_bundle[bundle], bundle) for bundle in bundles_by_address(addresses)
        ]

    def node_of(self, slot: int) -> ReservedNode:
        return self.in_use[slot // self._node_gpus]

    def strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling of a process on the slot."""
        node = self.node_of(slot)
        return PlacementGroupSchedulingStrategy(
            node.own_group or self._group, placement_group_bundle_index=node.bundle
        )

    def spares(self) -> list[ReservedNode]:
        """The nodes that no slot is on, in the order in which they replace others: by address."""
        if not self.in_use:
            return []
        taken = self._replaced | {node.node_id for node in self.in_use}
        return self._reachable(node for node in self._reserved() if node.node_id not in taken)

    def dead(self) -> list[ReservedNode]:
        """The nodes with slots that Ray has lost, or whose raylet accepts no connection: Ray takes its time."""
        well = self._reachable(self._alive())
        return [node for node in self.in_use if node not in well]

    def seen_dead(self) -> list[ReservedNode]:
        """The same for a report of another thread, by which no node is replaced: what it finds is noted nowhere."""
        in_use = [*self.in_use]
        alive = self._alive()
        well = [node for node, answered in zip(alive, _all_answer(alive), strict=True) if answered]
        return [node for node in in_use if node not in well]

    def _alive(self) -> list[ReservedNode]:
        """The nodes with slots that Ray has not lost."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [node for node in self.in_use if node.node_id in alive]

    def _reachable(self, nodes: Iterable[ReservedNode]) -> list[ReservedNode]:
        """Those whose raylet accepts a connection, in order."""
        silent_since_s = time.monotonic() - _SILENT_S
        asked = [
            node for node in nodes if self._silent_s.get(node.node_id, -math.inf) < silent_since_s
        ]
        reached = []
        for node, answered in zip(asked, _all_answer(asked), strict=True):
            if answered:
                reached.append(node)
            else:
                self._silent_s[node.node_id] = time.monotonic()
        return reached

    def replace(self, address: str) -> ReservedNode:
        """Put the slots of a node on the first spare node, which is returned. Raises NodesLost where none is left.

        The node need not be dead; it is never a spare node itself.
        """
        place = [node.address for node in self.in_use].index(address)
        spares = self.spares()
        if not spares:
            raise NodesLost(f"no spare node is left to replace {self.in_use[place]}")
        replaced = self.in_use[place]
        self._replaced.add(replaced.node_id)
        if replaced.own_group:
            # Ray would move it to a node that joins, and hold that one for nothing
            remove_placement_group(replaced.own_group)
        self.in_use[place] = spares[0]
        return spares[0]


def _all_answer(nodes: Sequence[ReservedNode]) -> list[bool]:
    with ThreadPoolExecutor(max_workers=_PROBES) as pool:
        return list(pool.map(_answers, nodes))


def _answers(node: ReservedNode) -> bool:
    try:
        socket.create_connection((node.address, node.port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True
