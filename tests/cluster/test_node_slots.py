"""Real Ray nodes that die: which nodes a run then has, and who is blamed."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import node_slots
from megarl.cluster.node_slots import NodeSlots, ReservedNode
from tests.ray_nodes import ROOT, RayNodes

FIRST, SECOND, THIRD, FOURTH = (f"127.0.0.{number}" for number in (2, 3, 4, 5))

# A run with two slots and a spare node, and later with a third slot on a node that joins. It prints what it sees; where
# it waits for a line, the test does what it said.
_RUN = """
import sys, time
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.cluster.supervisor import supervised

def tell(*words):
    print("run:", *words, flush=True)

def wait_for(deed):
    tell("do", deed)
    sys.stdin.readline()

def dead(cluster):
    return [node.address for node in cluster._dead()]

def start(cluster, name, slot):
    worker = cluster.worker(name, slot)
    cluster.gather({worker.start("tests.cluster.idle:Idle", slot): name}, among=[worker])
    (placed,) = cluster.gather({worker.own_placement(0): name}, among=[worker])
    tell(name, "slot", slot, placed.address)
    return worker

def run():
    with Cluster(2, node_gpus=1, spare_nodes=1) as cluster:
        tell("nodes", *cluster.nodes, "spare", *cluster.spare_nodes, "dead", *dead(cluster))
        first = start(cluster, "rank 0", 0)
        start(cluster, "rank 1", 1)
        second = cluster.nodes[1]
        wait_for("kill " + second)
        began = time.monotonic()
        try:
            cluster.gather({first.call("hang"): "rank 0"})
        except WorkerFailed as failed:
            tell("failed", failed)
            tell("faulty", *cluster.faulty_nodes(failed), "dead", *dead(cluster))
            tell("seconds", time.monotonic() - began)
        tell("replaced by", cluster.replace_node(second))
        tell("nodes", *cluster.nodes, "spare", *cluster.spare_nodes, "dead", *dead(cluster))
        start(cluster, "rank 1 again", 1)
        try:
            cluster.replace_node(cluster.nodes[1])
        except WorkerFailed as failed:
            tell("refused", failed)
        wait_for("start " + second)
        while not cluster.spare_nodes:
            time.sleep(0.1)
        tell("replaced by", cluster.replace_node(cluster.nodes[1]))
        tell("nodes", *cluster.nodes, "spare", *cluster.spare_nodes, "dead", *dead(cluster))
        start(cluster, "rank 1 once more", 1)
        tell("slots", cluster.extend_slots(4))
        wait_for("start 127.0.0.5")
        while cluster.extend_slots(3) < 3:
            time.sleep(0.1)
        tell("nodes", *cluster.nodes, "spare", *cluster.spare_nodes, "slots", cluster.extend_slots(4))
        worker = start(cluster, "engine", 2)
        cluster.end(worker)
        cluster.shrink_slots(2)
        tell("nodes", *cluster.nodes)
        tell("slots", cluster.extend_slots(3))
        cluster.shrink_slots(1)
        tell("nodes", *cluster.nodes)
        for _ in range(2):  # two processes that end before they are up
            ghost = cluster.worker("ghost", 0)
            ghost.kill()
            try:
                cluster.gather({ghost.call("hang"): "ghost"}, among=[ghost])
            except WorkerFailed as failed:
                tell("faulty", *cluster.faulty_nodes(failed))
                tell("faulty still", *cluster.faulty_nodes(failed))
        kept = [cluster.put(bytes(2**20)) for _ in range(4)]
        wait_for("end " + cluster.nodes[0])
        cluster.gather({first.call("hang"): "rank 0"})

def outcome():
    try:
        run()
    except WorkerFailed as failed:
        tell(f"megarl: {failed}")
    return 1

sys.exit(supervised(outcome, tell))
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    with (
        tempfile.TemporaryDirectory(prefix="n-", dir="/tmp") as disk,
        RayNodes(tmp_path, Path(disk), gpus=1) as three,
    ):
        three.start(FIRST, SECOND, THIRD)
        yield three


@pytest.mark.slow
def test_nodes_die_are_replaced_and_join_later(nodes: RayNodes, tmp_path: Path) -> None:
    """A spare node takes the slots of one that died, or that lives and is at fault; one that comes back is spare then.

    Further slots are on a node that joins later, which is given back when they are not needed. At last Ray ends on the
    run's own node, where it has objects: that ends the run, and none of the other nodes.
    """
    report = tmp_path / "bad_nodes"
    environment = nodes.environment() | {
        "RAY_ADDRESS": nodes.address,
        "PYTHONPATH": str(ROOT),
        "MEGARL_BAD_NODES": str(report),
    }
    run = subprocess.Popen(
        [sys.executable, "-c", _RUN],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdin and run.stdout
    deeds = {"kill": nodes.kill, "start": nodes.join, "end": nodes.kill_agent}
    told = []
    for line in run.stdout:
        mark, _, words = line.strip().partition("run: ")
        if mark or not words:
            continue  # Ray has its own word on a raylet's end
        if words.startswith("do "):
            _, deed, address = words.split()
            deeds[deed](address)
            run.stdin.write("\n")
            run.stdin.flush()
        else:
            told.append(words)
    assert run.wait(60) == 1, told
    agent_ended = told.pop().removeprefix("megarl: ")
    assert re.fullmatch(
        r"Ray's RuntimeEnvAgent \(pid \d+\) has ended, and with it its raylet; .*", agent_ended
    )
    assert nodes.is_running(SECOND)
    seconds = next(line for line in told if line.startswith("seconds "))
    told.remove(seconds)
    print(seconds)
    assert told == [
        f"nodes {FIRST} {SECOND} spare {THIRD} dead",
        f"rank 0 slot 0 {FIRST}",
        f"rank 1 slot 1 {SECOND}",
        "failed rank 1: its process died",
        f"faulty {SECOND} dead {SECOND}",
        f"replaced by {THIRD}",
        f"nodes {FIRST} {THIRD} spare dead",
        f"rank 1 again slot 1 {THIRD}",
        f"refused no spare node is left to replace {THIRD}.slurm ({THIRD})",
        f"replaced by {SECOND}",
        f"nodes {FIRST} {SECOND} spare dead",
        f"rank 1 once more slot 1 {SECOND}",
        "slots 2",
        f"nodes {FIRST} {SECOND} {FOURTH} spare slots 3",
        f"engine slot 2 {FOURTH}",
        f"nodes {FIRST} {SECOND}",
        "slots 3",
        f"nodes {FIRST} {SECOND}",
        "faulty",
        "faulty still",
        f"faulty {FIRST}",
        f"faulty still {FIRST}",
    ]
    unstarted = f"{FIRST}.slurm\tsuspicion\tghost did not start"
    reported = report.read_text().splitlines()
    assert reported[:3] == [
        f"{SECOND}.slurm\tfault\tit died (rank 1: its process died)",
        *[unstarted] * 2,
    ], "by the name that Slurm has for a node"
    # the suspicions have been enough for a run that ends by itself
    assert reported[3:] in ([], [f"{FIRST}.slurm\tfault\tit died ({agent_ended})"])


def reserved(address: str) -> ReservedNode:
    return ReservedNode(address, address, address, 0, 0)


def test_the_group_of_a_node_that_was_added_ends_when_another_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would move it to a node that joins later, which nobody could use then."""
    group: Any = "group"
    first, spare = reserved(FIRST), reserved(THIRD)
    added = replace(reserved(SECOND), own_group=group)
    slots = NodeSlots(node_gpus=1)
    slots.in_use = [first, added]
    removed: list[Any] = []
    monkeypatch.setattr(slots, "spares", lambda: [spare])
    monkeypatch.setattr(node_slots, "remove_placement_group", removed.append)

    assert slots.replace(SECOND) == spare
    assert removed == [group]
    slots.replace(FIRST)
    assert removed == [group]


def test_a_node_that_does_not_answer_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of each of its workers asks for it, and each time costs the seconds of a connection that is tried."""
    slots = NodeSlots(node_gpus=1)
    slots.in_use = [reserved(FIRST), reserved(SECOND)]
    alive = [{"NodeID": address, "Alive": True} for address in (FIRST, SECOND)]
    asked: list[str] = []

    def answers(node: ReservedNode) -> bool:
        asked.append(node.address)
        return node.address == FIRST

    monkeypatch.setattr(node_slots.ray, "nodes", lambda: alive)
    monkeypatch.setattr(node_slots, "_answers", answers)
    assert slots.seen_dead() == [reserved(SECOND)]
    assert slots._silent_s == {}, "a report is no cause of a replacement"
    asked.clear()
    assert [slots.dead(), slots.dead()] == [[reserved(SECOND)]] * 2
    assert asked.count(SECOND) == 1
    monkeypatch.setattr(node_slots, "_SILENT_S", 0.0)
    slots.dead()
    assert asked.count(SECOND) == 2
