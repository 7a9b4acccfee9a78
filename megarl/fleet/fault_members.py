"""Where the members of a silent fault are: what the controller knows of ranks and engines that name a number alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from megarl.cluster.actor import Worker
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.config import PlacementConfig
from megarl.types import FaultMember


def fault_members(
    cluster: Cluster, placement: PlacementConfig, workers: Mapping[int, Worker], num_gpus: int = 1
) -> dict[int, FaultMember]:
    """The members by their numbers. workers: by number; num_gpus: of each, from its slot on.

    Processes that have died meanwhile have no node.
    """
    nodes = dict.fromkeys(workers, "")
    with suppress(WorkerFailed):
        placements = cluster.placements([*workers.values()], placement)
        for number, placed in zip(workers, placements, strict=True):
            nodes[number] = f"{placed.host}, {placed.address}"
    members = {}
    for number, worker in workers.items():
        first = placement.gpu_of(worker.slot)
        gpus = tuple(range(first, first + num_gpus))
        members[number] = FaultMember(number, worker.name, gpus, nodes[number])
    return members
