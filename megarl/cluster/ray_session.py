"""The Ray session of a run, new or joined, and the GPU slots on its nodes."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
import ray.exceptions

from megarl.cluster import processes
from megarl.cluster.actor import SHARES, Ref, Worker, failure
from megarl.cluster.calls import Calls, OnLoss
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.hang_evidence import ClusterView, WatchedWorker
from megarl.cluster.hang_watch import HangWatch
from megarl.cluster.local_ray import start_ray
from megarl.cluster.node_faults import NodeFaults, hardware_error
from megarl.cluster.node_slots import NodesLost, NodeSlots, ReservedNode
from megarl.cluster.session_folder import (
    SESSION_PARENT,
    SESSION_PREFIX,
    SessionFolder,
    remove_dead,
)
from megarl.cluster.supervisor import note_session
from megarl.cluster.topology import DevicePlacement
from megarl.config import PlacementConfig, Recipe
from megarl.device import is_loopback
from megarl.diagnosis.phases import PhaseClock
from megarl.printable import Say, first_line
from megarl.types import UserError
from megarl.types.losses import Losses


class Cluster(Calls):
    """The GPU slots of a Ray session, which this command starts here or joins; a context manager.

    On exit a session that it started ends with all of its processes and files; a joined cluster goes on. Slot s is on
    node s // node_gpus; the nodes of a joined cluster are sorted by address, and a run takes whole nodes.
    """

    def __init__(
        self,
        gpus: int,
        node_gpus: int | None = None,
        timeout_s: float = 600.0,
        say: Say = lambda _: None,
        spare_nodes: int = 0,
        losses: Losses | None = None,
    ) -> None:
        """gpus: how many slots; 0: join a cluster without taking any. node_gpus: join the cluster that RAY_ADDRESS
        names and take so many GPUs of each node; None: start a session here.

        timeout_s: how long a worker may leave a heartbeat unanswered. say: prints a line for the user. spare_nodes: how
        many nodes more than the slots need are held for `replace_node`. losses: gets those of its processes.
        """
        self._gpus = gpus
        self._joins = node_gpus is not None
        super().__init__(timeout_s)
        self._slots = NodeSlots(node_gpus or gpus)
        self._num_spares = spare_nodes
        self._faults = NodeFaults(say)
        self.loss_log = losses or Losses()
        self.say = say
        # of all workers that there have been, also those whose slots are on another node now
        self._homes: dict[Worker, ReservedNode] = {}
        self._unstarted: set[Worker] = set()  # whose processes never came up, and were reported
        self._hang_watch: HangWatch | None = None

    @classmethod
    def of_run(cls, recipe: Recipe, say: Say, losses: Losses) -> Cluster:
        """The slots that a recipe begins with, and its spare nodes. losses: gets those of its processes."""
        return cls(
            gpus=recipe.first_gpus,
            node_gpus=recipe.placement.node_gpus,
            timeout_s=recipe.run.timeout_s,
            say=say,
            spare_nodes=recipe.placement.spare_nodes,
            losses=losses,
        )

    def __enter__(self) -> Cluster:
        processes.adopt_orphans()
        self._not_ours = {process.pid for process in processes.descendants()}
        if count := remove_dead(SESSION_PREFIX, SESSION_PARENT):
            folders = "folder" if count == 1 else "folders"
            self.say(f"removed {count} temporary {folders} of sessions that were killed")
        self._folder = SessionFolder(SESSION_PREFIX, SESSION_PARENT)
        self._tmpdir = os.environ.get("TMPDIR")
        # the files of a killed worker are removed with the session
        os.environ["TMPDIR"] = str(self._folder.path)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._join() if self._joins else self._begin()
            # Ray's own handler would end this process without cleaning up
            signal.signal(signal.SIGTERM, on_sigterm)
            socket = _raylet_socket()
            self._servers = processes.RayServers(socket, min(self._timeout_s, processes.STOPPED_S))
            losses = self.loss_log.file
            pages = self._hang_watch.folder if self._hang_watch else None
            note_session(socket, losses=losses, pages=pages)
            self._take_slots()
            own_node = next((node.name for node in self._own_nodes()), None)
            note_session(socket, own_node, losses, pages)
            if self._hang_watch:
                self._hang_watch.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        error = self._servers and self._servers.error()
        failed = raised
        if error and isinstance(raised, Exception) and not isinstance(raised, WorkerFailed):
            failed = WorkerFailed(error, "".join(traceback.format_exception(raised)))
        if isinstance(failed, WorkerFailed):
            with suppress(Exception):
                self.faulty_nodes(failed)
        try:
            self._write_last_page(failed, error)
        finally:
            self.close()
        if failed is not raised and failed is not None:
            raise failed from None

    def _write_last_page(self, failed: BaseException | None, lost_server: str | None) -> None:
        """Where the run ends by a hang or the loss of a server of Ray, if it has no page yet."""
        if isinstance(failed, Exception):
            if lost_server:
                self._before_hang(lost_server, is_certain=True)
            self.tell_hang(failed)

    def watch_phases(
        self, phases: PhaseClock, folder: Path, redacted: Callable[[str], str]
    ) -> None:
        """Before the session begins: write pages into the run's folder about phases that last too long.

        redacted: takes the secrets out of a text.
        """
        self._hang_watch = HangWatch(phases, folder, self.say, self._view, redacted)
        self._before_hang = self._hang_watch.before_end

    def _view(self) -> ClusterView:
        """For another thread, as of now."""
        awaited = {name for labels in self._awaited for name in [*labels.values()]}
        workers = [
            WatchedWorker(
                worker, self._homes[worker].address, self._pid_of(worker), worker.name in awaited
            )
            for worker in [*self._workers]
        ]
        nodes = [*self._slots.in_use]
        # of a session that is this command's own, the only node is here
        host = self.host if self._joins else nodes[0].address
        has_failed = self._servers is None or self._servers.has_failed
        return ClusterView(host, workers, nodes, self._slots.seen_dead, not has_failed)

    def _begin(self) -> None:
        # Ray's folder is open to everyone, its parent only to this user.
        start_ray(self._gpus, self._folder.path / "ray", self.say, self._not_ours)

    def _join(self) -> None:
        address = os.environ["RAY_ADDRESS"]
        host = address.rpartition(":")[0]
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Several nodes on one machine, as in tests: Ray itself would take the network's address.
                _node_ip_address=host if is_loopback(host) else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"no Ray cluster can be joined at {address} ({first_line(error)})"
            hint = "start Ray here and on the other nodes with the token that RAY_AUTH_TOKEN_PATH names"
            raise UserError("RAY_ADDRESS", problem, hint) from error
        self.host = ray.util.get_node_ip_address()

    def _take_slots(self) -> None:
        """Reserve the nodes; WorkerFailed where nodes have died or another run holds them."""
        try:
            self._slots.reserve(self._gpus, self._num_spares)
        except NodesLost as lost:
            raise WorkerFailed(str(lost), str(lost)) from None
        finally:
            for node in self._slots.died_before:
                self._faults.note(node, "fault", "it died before the run began")

    @property
    def nodes(self) -> list[str]:
        """The nodes' addresses, in the order of the slots."""
        return [node.address for node in self._slots.in_use]

    @property
    def spare_nodes(self) -> list[str]:
        """The addresses of the live nodes that no slot is on; the first replaces the next node."""
        return [node.address for node in self._slots.spares()]

    def faulty_nodes(self, failed: WorkerFailed) -> list[str]:
        """The addresses of the nodes with slots that are to blame for a failure, or for an earlier one; [] if none is.

        Each is reported, see `NodeFaults`. A run on this machine alone blames nobody.
        """
        if not self._joins:
            return []
        for node in self._dead():
            self._faults.note(node, "fault", f"it died ({failed})")
        # a replaceable one is watched no longer; others of the name were before it
        failing = [worker for worker in self._homes if worker.name == failed.worker][-1:]
        error = hardware_error(failed.evidence)
        for worker in failing if error else ():
            self._faults.note(self._homes[worker], "fault", f"{worker.name}: {error}")
        suspects = dict.fromkeys([*self._workers, *failing])
        unstarted = [worker for worker in suspects if self._has_never_started(worker)]
        # several on one node have one cause
        for node, worker in {self._homes[worker]: worker for worker in unstarted}.items():
            self._faults.note(node, "suspicion", f"{worker.name} did not start")
        self._unstarted.update(unstarted)
        return [node.address for node in self._slots.in_use if self._faults.is_bad(node)]

    def _dead(self) -> list[ReservedNode]:
        """The nodes with slots that have died; this process's own where a server of its Ray has: Ray is mute then."""
        if self._servers and self._servers.error():
            return self._own_nodes()
        return self._slots.dead()

    def _own_nodes(self) -> list[ReservedNode]:
        """This process's own, if it is joined and has slots."""
        return [node for node in self._slots.in_use if self._joins and node.address == self.host]

    def _has_never_started(self, worker: Worker) -> bool:
        """Whether the worker's process died before it answered a heartbeat, and is not known for that yet."""
        is_dead = isinstance(failure(worker.watch_refs[0]), ray.exceptions.RayActorError)
        if not is_dead or worker in self._unstarted:
            return False
        self._pulses.ask([worker])
        return self._pid_of(worker) is None

    def replace_node(self, address: str) -> str:
        """Put the slots of a node, dead or not, on a spare node from now on; returns its address.

        The workers on the node are the caller's to replace, by `worker` with the same slots. Raises WorkerFailed where
        no spare node is left.
        """
        try:
            return self._slots.replace(address).address
        except NodesLost as lost:
            raise WorkerFailed(str(lost), str(lost)) from None

    def replace_dead_nodes(self) -> None:
        """Put the slots of each node that has died on a spare node. Raises WorkerFailed where too few are left."""
        if not self._joins:
            return
        for node in self._dead():
            spare = self.replace_node(node.address)
            self._faults.note(node, "fault", "it died")
            self.say(f"node {node.address} has died: its slots are on node {spare} from now on")

    def worker(
        self,
        name: str,
        slot: int,
        on_loss: OnLoss | None = None,
        gpus: float = 1 / SHARES,
        *,
        computes: bool = False,
    ) -> Worker:
        """Start a process on GPU slot `slot`; up to four share a slot: policy, engine, critic and reward model.

        on_loss: makes the worker replaceable: called once, with the cause, when the process has died or is silent.
        gpus: 0 for a process that uses the node alone. computes: as of `Worker`; where it stands still, it is lost.
        """
        worker = Worker(name, slot, self.host, self._strategy(slot), gpus, computes=computes)
        self._workers.append(worker)
        self._causes.pop(name, None)
        self._homes[worker] = self._slots.node_of(slot)
        if on_loss:
            self._owners[worker] = on_loss
        return worker

    @property
    def workers(self) -> list[Worker]:
        """Those that are watched: all but the lost ones."""
        return list(self._workers)

    def extend_slots(self, gpus: int) -> int:
        """Take free nodes of a joined cluster until there are so many slots, as far as possible; how many there are."""
        return self._slots.extend(gpus)

    def shrink_slots(self, gpus: int) -> None:
        """Give back nodes that `extend_slots` has taken, where no process is on the slots from this number on."""
        self._slots.shrink(gpus)

    def _strategy(self, slot: int) -> object:
        return self._slots.strategy(slot)

    def placements(
        self, workers: Sequence[Worker], placement: PlacementConfig
    ) -> list[DevicePlacement]:
        """The placement of each worker. Raises RuntimeError where a process is not on the node of its slot."""
        calls = {
            worker.own_placement(placement.gpu_of(worker.slot)): worker.name for worker in workers
        }
        placements = self.gather(calls)
        for worker, placed in zip(workers, placements, strict=True):
            address = self._slots.node_of(worker.slot).address
            if placed.address != address:
                raise RuntimeError(
                    f"{worker.name} of GPU slot {worker.slot} is on {placed.address}, not on {address}"
                )
        return placements

    def _is_here(self, worker: Worker) -> bool:
        return not self._joins or self._homes[worker].address == self.host

    def _is_out_of_reach(self, worker: Worker) -> bool:
        home = self._homes[worker]
        return home not in self._slots.in_use or home in self._slots.dead()

    def _is_displaced(self, worker: Worker) -> bool:
        return self._slots.node_of(worker.slot) != self._homes[worker]

    def put(self, value: object) -> Ref:
        self._check_servers()
        return ray.put(value)

    def close(self) -> None:
        """End the session and remove all of its processes, sockets, shared-memory files and folders."""
        with processes.interrupts_ignored():
            if self._hang_watch:
                self._hang_watch.end()
            ended = self._pids_here()
            ended |= {process.pid for process in processes.descendants(spare=self._not_ours)}
            # Ray's own shutdown would wait for the dead server
            if self._servers and self._servers.error():
                processes.kill_descendants(spare=self._not_ours)
            else:
                for worker in self._workers:
                    with suppress(Exception):
                        worker.kill()
            self._workers.clear()
            self._owners.clear()
            ray.shutdown()
            if self._servers:
                note_session("")
                self._servers.close()
                self._servers = None
            processes.kill_descendants(spare=self._not_ours)
            processes.remove_counters(ended)
            self._folder.remove()
            os.environ.pop("TMPDIR")
            if self._tmpdir is not None:
                os.environ["TMPDIR"] = self._tmpdir


def _raylet_socket() -> str:
    """The path of the socket of this process's raylet."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == node_id)
