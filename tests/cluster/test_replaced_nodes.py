"""Workers whose node has died, or whose slots are on another node now: what is killed there, and who is to blame.

Nodes and Ray are stood in for; real nodes die in test_node_slots.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import ray.exceptions

from megarl.cluster import calls, ray_session
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.node_slots import ReservedNode
from megarl.cluster.pulses import Pulses
from megarl.cluster.ray_session import Cluster

ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def node(number: int) -> ReservedNode:
    return ReservedNode(f"id{number}", f"10.0.0.{number}", f"n{number}", 6000, number)


@dataclass(eq=False)
class Worker:
    name: str
    slot: int
    host: str = ""
    strategy: object = None
    gpus: float = 0
    computes: bool = False
    watch_refs: list[Any] = field(default_factory=lambda: [object()])

    def pulse(self) -> object:
        return object()

    def kill(self) -> None: ...

    def compute(self, function: str, pid: int) -> tuple[object, int]:
        return self.strategy, pid


class Slots:
    """Two nodes with a slot each, and a spare one."""

    def __init__(self) -> None:
        self.in_use = [node(1), node(2)]
        self.died: list[ReservedNode] = []

    def node_of(self, slot: int) -> ReservedNode:
        return self.in_use[slot]

    def strategy(self, slot: int) -> str:
        return self.in_use[slot].name

    def dead(self) -> list[ReservedNode]:
        return [node for node in self.in_use if node in self.died]

    def replace(self, address: str) -> ReservedNode:
        self.in_use[1] = node(3)
        return self.in_use[1]


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.killed: list[Any] = []
        monkeypatch.setattr(ray_session, "Worker", Worker)
        monkeypatch.setattr(calls, "Worker", Worker)
        monkeypatch.setattr(calls, "answers", lambda sent, _: self.killed.extend(sent))
        self.cluster = Cluster(2, node_gpus=1, say=self.lines.append)
        self.cluster.host = "10.0.0.1"
        self.slots: Any = Slots()
        self.cluster._slots = self.slots

    def worker(self, name: str, slot: int, pid: int | None) -> Any:
        """A replaceable worker, which has answered if it has a process id."""
        worker = self.cluster.worker(name, slot, lambda _: None)
        if pid is not None:
            self.cluster._quick_pulses.pids[worker] = pid
        return worker


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker's process has died."""
    monkeypatch.setattr(ray_session, "failure", lambda _: ray.exceptions.ActorDiedError())
    monkeypatch.setattr(Pulses, "ask", lambda *_: None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_nothing_is_killed_on_the_node_that_has_the_slots_of_a_worker_now(world: World) -> None:
    """There the worker's process id is another process's."""
    first, second, third = [world.worker(f"rank {pid}", slot=1, pid=pid) for pid in (17, 18, 19)]
    world.cluster.end(first)
    assert world.killed == [("n2", 17)]
    world.slots.died = [node(2)]
    world.cluster.end(second)
    world.cluster.replace_dead_nodes()
    world.cluster.end(third)
    assert world.killed == [("n2", 17)]
    world.cluster.end(world.worker("rank 20", slot=1, pid=20))
    assert world.killed == [("n2", 17), ("n3", 20)]


def test_a_node_that_a_spare_one_replaces_is_to_blame(world: World) -> None:
    world.slots.died = [node(2)]
    world.cluster.replace_dead_nodes()
    world.cluster.replace_dead_nodes()
    assert world.lines == [
        "node n2 (10.0.0.2): it died",
        "node 10.0.0.2 has died: its slots are on node 10.0.0.3 from now on",
    ]


def test_the_gpu_of_a_worker_that_was_given_up_is_to_blame(world: World) -> None:
    """Where it was when it failed, however the failure begins."""
    worker = world.worker("rank 1", slot=1, pid=17)
    world.cluster._forget(worker)
    failed = WorkerFailed("lost too often: rank 1", ECC, "rank 1")
    assert world.cluster.faulty_nodes(failed) == ["10.0.0.2"]
    assert world.lines == ["node n2 (10.0.0.2): rank 1: uncorrectable ECC error"]


def test_a_worker_that_was_given_up_before_it_started_makes_its_node_suspicious(
    world: World,
) -> None:
    failed = WorkerFailed("rank 1: its process died", "", "rank 1")
    for bad_nodes in ([], ["10.0.0.2"]):
        world.cluster._forget(world.worker("rank 0", slot=0, pid=None))
        world.cluster._forget(world.worker("rank 1", slot=1, pid=None))
        assert world.cluster.faulty_nodes(failed) == bad_nodes
    assert world.lines == ["node n2 (10.0.0.2): rank 1 did not start"] * 2
