"""Ray: a session of our own or a running cluster, GPU slots on its nodes, processes on them. The only `import ray`."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megarl import ray_settings  # noqa: F401  isort: skip  (before Ray)
import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl import processes
from megarl.device import LOOPBACK, is_loopback, use_network
from megarl.types import UserFault

Ref = ray.ObjectRef
_GRACE_S = 3.0  # a death breaks its peers' collectives first: this long is waited for the cause to show
_OBJECT_STORE_BYTES = 2**30
_SHARES = 4  # of a GPU slot
_PLACING_S = 60.0  # that GPUs of a running cluster are waited for


class WorkerFailed(Exception):
    """A worker died or raised; the message names the worker and its own cause, `evidence` is its traceback or end."""

    def __init__(self, message: str, evidence: str) -> None:
        super().__init__(message, evidence)
        self.message, self.evidence = message, evidence

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class _Together:
    """Arguments that travel as one object; the method that is called with it gets them one by one."""

    values: tuple[Any, ...]


class _Shell:
    """The actor around a plain class: async methods run on the loop, the others on one thread that never changes.

    (Autograd modes, CUDA contexts and collectives are per thread.) `watch` never returns, so its reference fails the
    moment the process is gone, whatever else is or is not being called.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._target: Any = None
        self._is_made = asyncio.Event()

    async def start(self, host: str, folder: str, target: str, *args: Any) -> int:
        module, _, name = target.partition(":")
        loop = asyncio.get_running_loop()
        use_network(host)
        _enter(folder)
        cls = await loop.run_in_executor(self._thread, lambda: getattr(importlib.import_module(module), name))
        self._target = await loop.run_in_executor(self._thread, lambda: cls(*args))
        self._is_made.set()
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        await self._is_made.wait()
        function = getattr(self._target, method)
        args = tuple(chain.from_iterable(one.values if isinstance(one, _Together) else (one,) for one in args))
        if asyncio.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))

    async def call_many(self, count: int, method: str, *args: Any) -> Any:
        found = await self.call(method, *args)
        return found if count > 1 else found[0]  # Ray would take a single return to be the sequence itself

    async def together(self, function: str, *args: Any) -> _Together:
        module, _, name = function.partition(":")
        make = getattr(importlib.import_module(module), name)
        return _Together(tuple(await asyncio.get_running_loop().run_in_executor(self._thread, lambda: make(*args))))

    async def watch(self) -> None:
        await asyncio.Event().wait()


class Worker:
    """One remote process."""

    def __init__(self, name: str, actor: Any, host: str) -> None:
        """host: an address of the node from which the run is led."""
        self.name, self._actor, self._host = name, actor, host
        self.watch_refs: list[Ref] = [actor.watch.remote()]

    def start(self, target: str, *args: Any) -> Ref:
        """Import `module:Class` over there and make it with args; the reference is the process id."""
        return self._actor.start.remote(self._host, os.getcwd(), target, *args)

    def call(self, method: str, *args: Any) -> Ref:
        """Call a method; arguments that are references are fetched by the worker's node, not by the caller."""
        return self._actor.call.remote(method, *args)

    def call_many(self, count: int, method: str, *args: Any) -> list[Ref]:
        """Call a method that returns `count` things which live apart, so that each goes where it is wanted alone."""
        refs = self._actor.call_many.options(num_returns=count).remote(count, method, *args)
        return refs if count > 1 else [refs]

    def watch(self, method: str) -> None:
        """Hear from now on, whatever else is being called, what a method raises that otherwise does not return."""
        self.watch_refs.append(self.call(method))

    def together(self, function: str, *args: Any) -> Ref:
        """What `module:function` makes of the arguments over there, as one object that many are called with.

        They get its items as arguments. Every reference among a call's arguments costs its caller some 10 microseconds.
        """
        return self._actor.together.remote(function, *args)

    def kill(self) -> None:
        ray.kill(self._actor)


class Cluster:
    """GPU slots of a Ray session, of this command's own or of nodes that run already; left as it was found, by `with`.

    A session of its own ends with every process and file of it. Slot s is on node s // node_gpus; of a running cluster
    the nodes are in the order of their addresses, and each gives all slots of a node together.
    """

    def __init__(self, gpus: int, node_gpus: int | None = None) -> None:
        """node_gpus: join the cluster that RAY_ADDRESS names, and take so many of each node; None: begin one here."""
        self._gpus, self._joins, self._node_gpus = gpus, node_gpus is not None, node_gpus or gpus
        self._workers: list[Worker] = []
        self._placement: PlacementGroup
        self._bundles: list[int] = []  # of each node, in the order of the slots
        self._folder = ""
        self.host = LOOPBACK
        self.nodes: list[str] = []  # their addresses, in the order of the slots

    def __enter__(self) -> Cluster:
        processes.adopt_orphans()
        self._not_ours = {process.pid for process in processes.descendants()}
        # Not TMPDIR: Ray puts Unix sockets in it, whose paths may have 107 bytes at most.
        self._folder = tempfile.mkdtemp(prefix="megarl-", dir="/tmp")
        self._tmpdir = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = self._folder  # what a killed worker leaves is found and removed with the session
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._join() if self._joins else self._begin()
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler would end this process without cleaning up
            self._take_slots()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        ray.init(
            address="local",
            num_gpus=self._gpus,
            num_cpus=_SHARES * self._gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._folder,
            _node_ip_address=LOOPBACK,
        )

    def _join(self) -> None:
        address = os.environ["RAY_ADDRESS"]
        host = address.rpartition(":")[0]
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Several nodes on one machine, as in tests: Ray itself would take the address of the network.
                _node_ip_address=host if is_loopback(host) else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"no Ray cluster that can be joined at {address} ({str(error).splitlines()[0]})"
            mend = "start Ray here and on the other nodes with the token that RAY_AUTH_TOKEN_PATH names"
            raise UserFault("RAY_ADDRESS", problem, mend) from error
        self.host = ray.util.get_node_ip_address()

    def _take_slots(self) -> None:
        """One bundle for each node: its GPUs, as many as the run needs of it."""
        sizes = [min(self._node_gpus, self._gpus - start) for start in range(0, self._gpus, self._node_gpus)]
        fit = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= self._node_gpus]
        if len(fit) < len(sizes):
            problem = f"{self._gpus} GPUs are {len(sizes)} nodes of {self._node_gpus}, Ray has {len(fit)} such nodes"
            raise UserFault("placement.gpus", problem, "start Ray on more nodes, or lower it")
        self._placement = placement_group([{"GPU": size} for size in sizes], strategy="STRICT_SPREAD")
        ready = self._placement.ready()
        if not ray.wait([ready], timeout=_PLACING_S)[0]:
            mend = "wait for the other job of this Ray cluster to end, or start more nodes"
            raise UserFault("placement.gpus", f"{self._gpus} GPUs are not free in the Ray cluster", mend)
        self.gather({ready: "placement group"})
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in fit}
        on = {bundle: addresses[node] for bundle, node in _nodes_of(self._placement).items()}
        # The last slots are on the node that gives fewer: its bundle cannot change places with another.
        by_address = sorted(range(len(sizes)), key=lambda bundle: (-sizes[bundle], ipaddress.ip_address(on[bundle])))
        self._bundles, self.nodes = by_address, [on[bundle] for bundle in by_address]

    def worker(self, name: str, slot: int) -> Worker:
        """Start a process on GPU slot `slot`, which up to four share: policy, engine, critic and reward model."""
        bundle = self._bundles[slot // self._node_gpus]
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_gpus": 1 / _SHARES, "num_cpus": 0, "max_concurrency": 4096}
        actor = ray.remote(_Shell).options(scheduling_strategy=strategy, **options).remote()
        worker = Worker(name, actor, self.host)
        self._workers.append(worker)
        return worker

    def put(self, value: object) -> Ref:
        return ray.put(value)

    def gather(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> list[Any]:
        """The results in order; raises WorkerFailed, or the worker's own UserFault, as soon as any worker fails.

        among: the workers whose failures count; all of them unless they are given.
        """
        self.await_all(labels, among)
        return ray.get(list(labels))

    def await_all(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> None:
        """`gather` without fetching what comes of it."""
        watched = self._workers if among is None else among
        watches = {ref: worker.name for worker in watched for ref in worker.watch_refs}
        pending = dict(labels)
        while pending:
            done = _ended([*pending, *watches])
            failures = [failure for ref in done if (failure := _failure(ref)) is not None]
            if failures:
                at_fault = [failure for failure in failures if isinstance(failure, UserFault)]
                raise at_fault[0] if at_fault else self._cause([*pending, *watches], {**labels, **watches})
            for ref in done:
                pending.pop(ref, None)

    def settle(self, calls: Mapping[Ref, str]) -> bool:
        """Wait until every call has ended, well or not; False as soon as the process of any worker is gone."""
        watches = {ref for worker in self._workers for ref in worker.watch_refs}
        pending = set(calls)
        while pending:
            done = {*_ended([*pending, *watches])}
            if done & watches:
                return False
            pending -= done
        return True

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Any]:
        """Call the same method of each; the results in their order. Raises as `gather` does."""
        return self.gather({worker.call(method): worker.name for worker in workers})

    def _cause(self, refs: Sequence[Ref], labels: Mapping[Ref, str]) -> Exception:
        """The failure to report: a user's fault first, then a dead process, then whatever else was raised."""
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_GRACE_S)
        failures = [(labels[ref], failure) for ref in done if (failure := _failure(ref)) is not None]
        return _worst(failures)

    def close(self) -> None:
        """End the session: no process, socket, shared-memory file or folder of it is left."""
        with processes.interrupts_ignored():
            for worker in self._workers:
                with suppress(Exception):
                    worker.kill()
            self._workers.clear()
            ray.shutdown()
            processes.kill_descendants(spare=self._not_ours)
            shutil.rmtree(self._folder, ignore_errors=True)
            os.environ.pop("TMPDIR")
            if self._tmpdir is not None:
                os.environ["TMPDIR"] = self._tmpdir


def _enter(folder: str) -> None:
    """Make the paths of a recipe mean on every node what they mean to the command."""
    try:
        os.chdir(folder)
    except OSError as error:
        problem = f"is not on node {ray.util.get_node_ip_address()} ({error.strerror})"
        raise UserFault(folder, problem, "start the run in a folder that all nodes share") from None


def _nodes_of(placement: PlacementGroup) -> dict[int, str]:
    """Ray's id of the node on which each bundle is."""
    return placement_group_table(placement)["bundles_to_node_id"]


def _ended(refs: list[Ref]) -> list[Ref]:
    """Those that have ended, as soon as one has. All of them: each question costs as much as there are references.

    What they return stays on its node.
    """
    ray.wait(refs, num_returns=1, fetch_local=False)
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return done


def _failure(ref: Ref) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, UserFault) else error
    except ray.exceptions.RayError as error:
        return error
    return None


def _worst(failures: Iterable[tuple[str, Exception]]) -> Exception:
    def rank(item: tuple[str, Exception]) -> int:
        if isinstance(item[1], UserFault):
            return 0
        return 1 if isinstance(item[1], ray.exceptions.RayActorError) else 2

    name, cause = min(failures, key=rank)
    if isinstance(cause, UserFault):
        return cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return WorkerFailed(f"{name}: its process died", str(cause))
    raised = getattr(cause, "cause", cause)
    last_line = str(raised).strip().splitlines()[-1:] or [""]
    return WorkerFailed(f"{name}: {type(raised).__name__}: {last_line[0]}", str(cause))
