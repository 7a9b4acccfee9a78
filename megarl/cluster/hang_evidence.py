"""Collects what is known of a run that hangs, from the controller's node, the workers and the other nodes.

Everything has a limit, and what does not answer within it is named as such: that is evidence, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
from ray._private.state import available_resources_per_node, total_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actor import Ref, Worker, answers
from megarl.cluster.node_slots import ReservedNode
from megarl.diagnosis.evidence import Evidence, NodeEvidence, ProcessEvidence, WorkerEvidence
from megarl.diagnosis.phases import Phase
from megarl.diagnosis.stacks import processes_of, unpacked
from megarl.types.conditions import WorkerCondition

_CONDITION_S = 3.0  # for all workers together
_RAY_S = 0.5  # for each of two questions to Ray's servers, which were asked before the workers
_STACKS_S = 4.5  # for the stacks of other nodes, after those of this one were read
_STORE = "object_store_memory"

Result = TypeVar("Result")


@dataclass(frozen=True)
class WatchedWorker:
    """A worker of the run: on which node, its process id where it is known, and whether it is waited for."""

    worker: Worker
    node: str
    pid: int | None
    is_awaited: bool


@dataclass(frozen=True)
class ClusterView:
    """The workers and nodes of a run at a moment. host: the address of the controller's node.

    dead: asks which of the nodes have died. may_ask_ray: whether this node's servers of Ray are alive; where they are
    not, a call of Ray's may end this process.
    """

    host: str
    workers: Sequence[WatchedWorker]
    nodes: Sequence[ReservedNode]
    dead: Callable[[], list[ReservedNode]]
    may_ask_ray: bool


def collect(view: ClusterView, reason: str, phase: Phase | None) -> Evidence:
    """The evidence, in less than fifteen seconds."""
    dead: list[ReservedNode] = []
    conditions: dict[str, WorkerCondition] = {}
    stores: dict[str, float] = {}
    calls_by_address: dict[str, Ref] = {}
    workers = view.workers
    if view.may_ask_ray:
        asked_dead = Asked(view.dead)
        asked_stores = Asked(_store_shares)
        conditions = _conditions(workers)
        workers = [_with_pid(watched, conditions) for watched in workers]
        view = replace(view, workers=workers)
        dead = asked_dead.answer(_RAY_S) or []
        calls_by_address = _ask_other_nodes(view, dead, conditions)
        stores = asked_stores.answer(_RAY_S) or {}
    pids = _pids(view, view.host) | {os.getpid(): "controller"}
    processes = [replace(process, node=view.host) for process in processes_of(pids)]
    processes_elsewhere, problems = _read_answers(calls_by_address)
    nodes = [
        NodeEvidence(
            address=node.address,
            store_share=stores.get(node.node_id),
            problem=problems.get(node.address, ""),
            is_dead=node in dead,
        )
        for node in view.nodes
    ]
    return Evidence(
        reason=reason,
        phase=phase,
        seconds=time.monotonic() - phase.began_s if phase else 0.0,
        workers=[_worker_evidence(watched, conditions) for watched in workers],
        processes=[*processes, *processes_elsewhere],
        nodes=nodes,
    )


class Asked(Generic[Result]):
    """A question to Ray's servers, which is asked in a thread of its own: nobody has to wait for its end."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._results: list[Result] = []
        self._thread = threading.Thread(target=self._run, name="hang-evidence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):
            self._results.append(self._function())

    def answer(self, timeout_s: float) -> Result | None:
        """What the function returns; None where it has raised, or has not returned yet."""
        self._thread.join(timeout_s)
        return self._results[0] if self._results else None


def _pids(view: ClusterView, address: str) -> dict[int, str]:
    """The workers of a node by process id."""
    return {
        watched.pid: watched.worker.name
        for watched in view.workers
        if watched.pid is not None and watched.node == address
    }


def _conditions(workers: Sequence[WatchedWorker]) -> dict[str, WorkerCondition]:
    """By name, of those that answer in time."""
    calls = {watched.worker.condition(): watched.worker.name for watched in workers}
    if not calls:
        return {}
    by_name = answers(calls, _CONDITION_S)
    return {name: answer for name, answer in by_name.items() if isinstance(answer, WorkerCondition)}


def _with_pid(watched: WatchedWorker, conditions: Mapping[str, WorkerCondition]) -> WatchedWorker:
    """The worker with the process id that it has just told, if no heartbeat has before."""
    if watched.worker.name in conditions:
        return replace(watched, pid=conditions[watched.worker.name].pid)
    return watched


def _ask_other_nodes(
    view: ClusterView, dead: Sequence[ReservedNode], conditions: Mapping[str, WorkerCondition]
) -> dict[str, Ref]:
    """By address, the calls that read the stacks on each other node, by a worker there that answers.

    Where none answers a process is started for it, if Ray can.
    """
    calls = {}
    for node in view.nodes:
        if node.address == view.host or node in dead:
            continue
        pids = _pids(view, node.address)
        there = [watched.worker for watched in view.workers if watched.node == node.address]
        reader = next((worker for worker in there if worker.name in conditions), None)
        if reader is None:
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            reader = Worker(f"stacks of {node.address}", 0, view.host, strategy, gpus=0)
        calls[node.address] = reader.read_processes(pids)
    return calls


def _read_answers(calls: Mapping[str, Ref]) -> tuple[list[ProcessEvidence], dict[str, str]]:
    """The processes of other nodes; and by address, why there are none."""
    processes: list[ProcessEvidence] = []
    problems = {}
    answer_by_address: dict[str, Any] = {}
    if calls:
        answer_by_address = answers({ref: address for address, ref in calls.items()}, _STACKS_S)
    for address, answer in answer_by_address.items():
        if isinstance(answer, bytes):
            processes += [replace(process, node=address) for process in unpacked(answer)]
        else:
            problems[address] = f"the stacks of its processes could not be read ({answer})"
    return processes, problems


def _worker_evidence(
    watched: WatchedWorker, conditions: Mapping[str, WorkerCondition]
) -> WorkerEvidence:
    return WorkerEvidence(
        name=watched.worker.name,
        node=watched.node,
        pid=watched.pid,
        is_awaited=watched.is_awaited,
        condition=conditions.get(watched.worker.name),
    )


def _store_shares() -> dict[str, float]:
    """By the id of a node, how full its object store is. Ray leaves out what is used up, and nodes that it lost."""
    available = available_resources_per_node()
    shares = {}
    for node_id, resources in total_resources_per_node().items():
        if node_id in available and (total := resources.get(_STORE)):
            shares[node_id] = 1 - available[node_id].get(_STORE, 0.0) / total
    return shares
