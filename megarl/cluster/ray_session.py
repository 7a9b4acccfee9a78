"""The Ray session of a run, new or joined, and the GPU slots on its nodes."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import processes
from megarl.cluster.actor import Background, Pulses, Ref, Worker, failure
from megarl.cluster.local_ray import start_ray
from megarl.cluster.session_folder import SessionFolder, remove_dead
from megarl.cluster.topology import DevicePlacement, bundles_by_address
from megarl.config import PlacementConfig
from megarl.device import LOOPBACK, is_loopback
from megarl.printable import first_line
from megarl.types import Silence, UserError

# a dead process first breaks its peers' collectives: wait this long for the cause to show
_GRACE_S = 3.0
_PLACING_S = 60.0  # how long to wait for the GPUs of a running cluster
_LOOK_S = 1.0  # between two checks of Ray's servers and of heartbeats
# of the session's folder; not TMPDIR: a Unix socket's path has at most 107 bytes
_PREFIX = "megarl-"
_PARENT = "/tmp"
_OTHER = 3


class WorkerFailed(Exception):
    """A worker died or raised; the message names the worker and the cause, `evidence` is its traceback."""

    def __init__(self, message: str, evidence: str) -> None:
        super().__init__(message, evidence)
        self.message = message
        self.evidence = evidence

    def __str__(self) -> str:
        return self.message


class Cluster:
    """The GPU slots of a Ray session, which this command starts here or joins; a context manager.

    The calls of background work (`begin_background`) are attended to while any others are waited for, and their
    failures are reported alike.

    On exit a session that it started ends with all of its processes and files; a joined cluster goes on. Slot s is on
    node s // node_gpus; the nodes of a joined cluster are sorted by address, and a run takes whole nodes.
    """

    def __init__(
        self,
        gpus: int,
        node_gpus: int | None = None,
        timeout_s: float = 600.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """gpus: how many slots; 0: join a cluster without taking any. node_gpus: join the cluster that RAY_ADDRESS
        names and take so many GPUs of each node; None: start a session here.

        timeout_s: how long a worker may leave a heartbeat unanswered. say: prints a line for the user.
        """
        self._gpus = gpus
        self._joins = node_gpus is not None
        self._node_gpus = node_gpus or gpus
        self._timeout_s = timeout_s
        self._say = say
        self._pulses = Pulses(timeout_s)
        self._workers: list[Worker] = []
        self._placement: PlacementGroup
        # the placement group's bundle of each node, in the order of the slots
        self._bundles: list[int] = []
        self._servers: processes.RayServers | None = None
        self._background: Background | None = None
        self.host = LOOPBACK
        self.nodes: list[str] = []  # the nodes' addresses, in the order of the slots

    def __enter__(self) -> Cluster:
        processes.adopt_orphans()
        self._not_ours = {process.pid for process in processes.descendants()}
        if count := remove_dead(_PREFIX, _PARENT):
            folders = "folder" if count == 1 else "folders"
            self._say(f"removed {count} temporary {folders} of sessions that were killed")
        self._folder = SessionFolder(_PREFIX, _PARENT)
        self._tmpdir = os.environ.get("TMPDIR")
        # the files of a killed worker are removed with the session
        os.environ["TMPDIR"] = str(self._folder.path)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._join() if self._joins else self._begin()
            # Ray's own handler would end this process without cleaning up
            signal.signal(signal.SIGTERM, on_sigterm)
            self._servers = processes.RayServers(_raylet_socket(), self._timeout_s)
            self._take_slots()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        error = self._servers and self._servers.error()
        self.close()
        if error and isinstance(raised, Exception) and not isinstance(raised, WorkerFailed):
            raise WorkerFailed(error, "".join(traceback.format_exception(raised))) from None

    def _begin(self) -> None:
        # Ray's folder is open to everyone, its parent only to this user.
        start_ray(self._gpus, self._folder.path / "ray", self._say, self._not_ours)

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
        """Reserve one placement group bundle a node, with all GPUs of the node; a process uses the GPU of its slot.

        Raises UserError where Ray has no such nodes, WorkerFailed where nodes have died or another run holds them.
        """
        if not (count := -(-self._gpus // self._node_gpus)):
            return
        nodes = ray.nodes()
        fit = [
            node
            for node in nodes
            if node["Alive"] and node["Resources"].get("GPU", 0) == self._node_gpus
        ]
        if len(fit) < count:
            problem = f"{self._gpus} GPUs are {count} nodes of {self._node_gpus}, Ray has {len(fit)} with as many GPUs"
            if len(fit) + sum(not node["Alive"] for node in nodes) >= count:
                raise WorkerFailed(f"{problem}: other nodes have died", problem)
            hint = "start Ray on more nodes, lower it, or correct placement.gpus_per_node"
            raise UserError("placement.gpus", problem, hint)
        self._placement = placement_group(
            [{"GPU": self._node_gpus}] * count, strategy="STRICT_SPREAD"
        )
        ready = self._placement.ready()
        if not ray.wait([ready], timeout=_PLACING_S)[0]:
            problem = f"{count} nodes of the Ray cluster were not free for {_PLACING_S:.0f} s: another run has one"
            raise WorkerFailed(problem, problem)
        self.gather({ready: "placement group"})
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in fit}
        node_ids = placement_group_table(self._placement)["bundles_to_node_id"]
        of_bundle = {bundle: addresses[node] for bundle, node in node_ids.items()}
        self._bundles = bundles_by_address(of_bundle)
        self.nodes = [of_bundle[bundle] for bundle in self._bundles]

    def worker(self, name: str, slot: int) -> Worker:
        """Start a process on GPU slot `slot`; up to four share a slot: policy, engine, critic and reward model."""
        bundle = self._bundles[slot // self._node_gpus]
        strategy = PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=bundle
        )
        worker = Worker(name, slot, self.host, strategy)
        self._workers.append(worker)
        return worker

    def placements(
        self, workers: Sequence[Worker], placement: PlacementConfig
    ) -> list[DevicePlacement]:
        """The placement of each worker. Raises RuntimeError where a process is not on the node of its slot."""
        calls = {
            worker.own_placement(placement.gpu_of(worker.slot)): worker.name for worker in workers
        }
        placements = self.gather(calls)
        for worker, placed in zip(workers, placements, strict=True):
            address = self._node_of(worker)
            if placed.address != address:
                raise RuntimeError(
                    f"{worker.name} of GPU slot {worker.slot} is on {placed.address}, not on {address}"
                )
        return placements

    def _node_of(self, worker: Worker) -> str:
        return self.nodes[worker.slot // self._node_gpus]

    def put(self, value: object) -> Ref:
        self._check_servers()
        return ray.put(value)

    def gather(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> list[Any]:
        """The results in order; raises WorkerFailed, or the worker's own UserError, as soon as any worker fails.

        among: the workers whose failures count; by default all.
        """
        self.await_all(labels, among)
        try:
            return ray.get(list(labels), timeout=self._timeout_s)
        except ray.exceptions.RayError as error:  # a node has died, with results that it stored
            failures = self._failures(labels) or [("a worker's result", error)]
            raise _reported(*min(failures, key=_severity)) from None

    @staticmethod
    def _failures(labels: Mapping[Ref, str]) -> list[tuple[str, Exception]]:
        """(label, what it has raised) of the calls that have raised something."""
        causes = [(label, failure(ref)) for ref, label in labels.items()]
        return [(label, cause) for label, cause in causes if cause is not None]

    def await_all(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> None:
        """`gather` without fetching the results."""
        pending = dict(labels)
        while pending:
            for ref in self.await_any(pending, among):
                del pending[ref]

    def await_any(
        self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None
    ) -> list[Ref]:
        """Wait until one of the calls, or more, have returned; these. Raises as `gather` does."""
        watched = self._workers if among is None else among
        watches = {ref: worker.name for worker in watched for ref in worker.watch_refs}
        while True:
            background = self._background if among is None else None
            waiting = {**labels, **(background.labels() if background else {})}
            done = self._ended([*waiting, *watches], watched)
            self._raise_failure(done, waiting | watches)
            if len(done) < len(waiting) and (silence := self._silence(watched)):
                raise WorkerFailed(silence, silence)
            ended = [ref for ref in done if ref not in labels]
            if background and ended:
                # while it takes these, what it waits for itself hands it no further ones
                self._background = None
                background.take(ended)
                self._background = background
            asked = [ref for ref in done if ref in labels]
            if asked:
                return asked

    def begin_background(self, work: Background) -> None:
        """Let work go on from now on, whenever the controller waits for any call; one at a time."""
        assert self._background is None, "the work before it has not been ended"
        self._background = work

    def end_background(self, work: Background) -> None:
        """The opposite; work that has not begun is ended, too."""
        assert self._background in (work, None)
        self._background = None

    def _raise_failure(self, done: Sequence[Ref], labels: Mapping[Ref, str]) -> None:
        """Raise what the most telling of these calls has raised, if any has: a user's error, else the likeliest cause.

        labels: of all calls that are open.
        """
        failures = self._failures({ref: labels[ref] for ref in done})
        for _, cause in failures:
            if isinstance(cause, UserError):
                raise cause
        if failures:
            raise self._cause(labels)

    def settle(self, calls: Mapping[Ref, str]) -> bool:
        """Wait until every call has returned or raised; False as soon as any worker dies or is silent for too long."""
        watches = {ref for worker in self._workers for ref in worker.watch_refs}
        pending = set(calls)
        while pending:
            done = {*self._ended([*pending, *watches], self._workers)}
            if done & watches or self._silence(self._workers):
                return False
            pending -= done
        return True

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Any]:
        """Call the same method of each worker; the results are in the workers' order. Raises as `gather` does."""
        return self.gather({worker.call(method): worker.name for worker in workers})

    def _cause(self, labels: Mapping[Ref, str]) -> Exception:
        """The failure to report, waiting a moment for a more telling one; see `_severity`."""
        self._pulses.ask(self._workers)
        done, _ = ray.wait(list(labels), num_returns=len(labels), timeout=_GRACE_S)
        failures = self._failures({ref: labels[ref] for ref in done})
        name, cause = min(failures, key=_severity)
        # A process that waited for a hanging one may time out before the hanging one has been silent for long enough.
        if _severity((name, cause)) == _OTHER and (silence := self._silence_now()):
            return WorkerFailed(silence, str(cause))
        return _reported(name, cause)

    def _ended(self, refs: list[Ref], watched: Sequence[Worker]) -> list[Ref]:
        """The calls that have ended, as soon as one has; [] after _LOOK_S. Also sends the heartbeats.

        Returns all ended calls at once, because the cost of each `ray.wait` grows with the number of references. The
        results stay on their nodes. Raises WorkerFailed when a server of Ray has died.
        """
        self._pulses.look(watched)
        ray.wait(refs, num_returns=1, timeout=_LOOK_S, fetch_local=False)
        self._check_servers()
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return done

    def _check_servers(self) -> None:
        """Raises WorkerFailed when a server of Ray has died: Ray itself would report it late, or end this process."""
        if self._servers and (error := self._servers.error()):
            raise WorkerFailed(error, error)

    def _silence(self, workers: Sequence[Worker]) -> str | None:
        """A description of a worker that has not answered for too long, if there is one."""
        for worker in workers:
            if self._pulses.silence_s(worker) >= self._timeout_s:
                return self._silence_of(worker)
        return None

    def _silence_now(self) -> str | None:
        """A description of a worker that has been silent for half as long, or that a signal has stopped."""
        for worker in self._pulses.unanswered():
            if self._pulses.silence_s(worker) >= self._timeout_s / 2 or self._is_stopped(worker):
                return self._silence_of(worker)
        return None

    def _silence_of(self, worker: Worker) -> str:
        who = worker.name
        if pid := self._pulses.pids.get(worker):
            who += f" (pid {pid})"
        silence = f"{who} has not answered for {self._pulses.silence_s(worker):.0f} s"
        if self._is_stopped(worker):
            silence += ": a signal stopped it"
        return silence

    def _is_stopped(self, worker: Worker) -> bool:
        """Whether a signal has stopped the worker; False for workers of other nodes."""
        pid = self._pid_here(worker)
        return pid is not None and processes.is_stopped(pid)

    def _pid_here(self, worker: Worker) -> int | None:
        """The worker's process id, if the worker is on this node and has ever answered."""
        if self._joins and self._node_of(worker) != self.host:
            return None
        return self._pulses.pids.get(worker)

    def close(self) -> None:
        """End the session and remove all of its processes, sockets, shared-memory files and folders."""
        with processes.interrupts_ignored():
            pids = {self._pid_here(worker) for worker in self._pulses.pids}
            ended = {pid for pid in pids if pid is not None}
            ended |= {process.pid for process in processes.descendants(spare=self._not_ours)}
            # Ray's own shutdown would wait for the dead server
            if self._servers and self._servers.error():
                processes.kill_descendants(spare=self._not_ours)
            else:
                for worker in self._workers:
                    with suppress(Exception):
                        worker.kill()
            self._workers.clear()
            ray.shutdown()
            if self._servers:
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


def _severity(failed: tuple[str, Exception]) -> int:
    """A sort key, the most telling failure first: a UserError, a dead process, a hanging process, any other error."""
    _, error = failed
    if isinstance(getattr(error, "cause", None), Silence):
        return 2
    if isinstance(error, UserError):
        return 0
    if isinstance(error, ray.exceptions.RayActorError):
        return 1
    return _OTHER


def _reported(name: str, cause: Exception) -> Exception:
    """The exception that reports a worker's failure."""
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return WorkerFailed(f"{name}: its process died", str(cause))
    raised = getattr(cause, "cause", cause)
    last_line = str(raised).strip().splitlines()[-1:] or [""]
    return WorkerFailed(f"{name}: {type(raised).__name__}: {last_line[0]}", str(cause))
