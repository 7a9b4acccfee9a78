"""A Ray actor of a run: the process itself, and the handle to it. With cluster/ray_session.py the only `import ray`."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  isort: skip  (before Ray)
from typing import Protocol

import ray
import ray.exceptions
from ray.experimental.locations import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.call_log import CallLog
from megarl.cluster.processes import RayletWatch
from megarl.cluster.stillness import Stillness, threads, work_of
from megarl.cluster.topology import DevicePlacement, own_placement
from megarl.cluster.visible_gpus import device_errors
from megarl.collector import collector_paused
from megarl.device import use_network, use_sglang_nccl_settings
from megarl.diagnosis.memory import is_out_of_memory, memory_use
from megarl.diagnosis.stacks import answer_with_stacks, packed_processes_of
from megarl.disk import has_open_calls
from megarl.timeline import recorder
from megarl.types import ProcessLost, SilentFault, UserError
from megarl.types.conditions import WorkerCondition
from megarl.types.memory_use import OutOfMemory
from megarl.types.remote import RemoteCall

Ref = ray.ObjectRef
SHARES = 4  # actors that share a GPU slot
_ERROR_LETTERS = 20_000
# RAY_max_direct_call_object_size: a smaller result comes with the answer to its call
_DIRECT_BYTES = 100 * 1024
# for an error of another node, which may be cut off: nobody looks at the workers meanwhile
_FETCH_S = 3.0
# concurrent calls of an actor: a heartbeat must not wait behind the prompts of an evaluation
_CALLS = 2**20
_LOOK_S = 1.0  # between two looks at the raylet


def at_arrival(ref: Ref) -> Any:
    """The reference, in a field of a `RemoteCall`: where the call arrives, the value that it refers to is there."""
    return ref


@dataclass(frozen=True)
class _Arriving:
    """Stands in a call that travels for the reference with this number, whose value Ray brings beside it."""

    number: int


def _resolvable(args: Sequence[Any]) -> Sequence[Any]:
    """Arguments for Ray; a `RemoteCall`'s references follow it: Ray resolves those alone that are arguments."""
    if not (args and isinstance(args[0], RemoteCall)):
        return args
    refs: list[Ref] = []

    def place(ref: Ref) -> _Arriving:
        refs.append(ref)
        return _Arriving(len(refs) - 1)

    return [_with_replaced(args[0], Ref, place), *refs]


def _resolved(args: Sequence[Any]) -> Sequence[Any]:
    """The opposite, where the references have arrived as values."""
    if not (args and isinstance(args[0], RemoteCall)):
        return args
    call, *values = args
    return [_with_replaced(call, _Arriving, lambda place: values[place.number])]


def _with_replaced(call: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The call with every value of this kind changed, in its fields and in lists in them."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, kind) else value

    return replace(
        call, **{field.name: changed(getattr(call, field.name)) for field in fields(call)}
    )


class _Shell:
    """The actor around a plain class: async methods run on the event loop, all others on one and the same thread.

    Autograd modes, CUDA contexts and collectives are per thread. `watch` never returns, so its reference fails as soon
    as the process dies, whatever other calls are running.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "calls")
        self._target: Any = None
        self._is_made = asyncio.Event()
        self._log = CallLog()
        # calls that the thread has not ended
        self._num_open = 0
        self._stillness = Stillness()
        # what Ray's own threads do is no progress, nor what this event loop does
        self._spared_threads: list[int] = []
        # On other nodes than the controller's. The worker looks by itself: a controller that waits for a result on this
        # node sends no heartbeats.
        self._raylet_watch: RayletWatch | None = None

    async def start(self, host: str, folder: str, target: str, *args: Any) -> int:
        self._spared_threads = threads()
        answer_with_stacks()
        if ray.util.get_node_ip_address() != host:
            self._raylet_watch = RayletWatch(os.getppid())
        use_network(host)
        use_sglang_nccl_settings()
        _enter(folder)
        await self._on_thread(_check_device)
        cls = await self._on_thread(_imported, target)
        with _errors_for_ray(), self._log.open("start"):
            self._target = await self._on_thread(cls, *args)
        self._is_made.set()
        return os.getpid()

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        finally:
            self._num_open -= 1
            self._stillness.end()

    async def call(self, method: str, *args: Any) -> Any:
        await self._is_made.wait()
        function = getattr(self._target, method)
        arguments = _resolved(args)
        with _errors_for_ray(), self._log.open(method):
            if asyncio.iscoroutinefunction(function):
                return await function(*arguments)
            return await self._on_thread(recorder.spanned(method)(function), *arguments)

    async def call_many(self, count: int, method: str, *args: Any) -> Any:
        results = [*await self.call(method, *args)]
        # with num_returns=1 Ray returns the sequence itself
        return results if count > 1 else results[0]

    async def compute(self, function: str, *args: Any) -> Any:
        with _errors_for_ray():
            return await self._on_thread(_imported(function), *args)

    async def own_placement(self, gpu: int) -> DevicePlacement:
        return own_placement(gpu, ray.util.get_node_ip_address())

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._raylet_watch:
                self._raylet_watch.kill_if_stopped()

    async def pulse(self) -> Pulse:
        # on the event loop, so that it answers while the thread is busy
        return Pulse(os.getpid(), self._is_made.is_set(), self._still_s())

    async def condition(self) -> WorkerCondition:
        return await self._log.condition(self._target)

    async def read_processes(self, pids: Mapping[int, str]) -> bytes:
        return await asyncio.to_thread(packed_processes_of, pids)

    def _still_s(self) -> float:
        """For how long a call has stood still; 0 while it starts, or waits for a disk, which is the disk's matter.

        What runs calls on the event loop says it by a method `still_s`.
        """
        if hasattr(self._target, "still_s"):
            return self._target.still_s()
        if self._num_open == 0 or not self._is_made.is_set() or has_open_calls():
            self._stillness.end()
            return 0.0
        return self._stillness.look(time.monotonic(), work_of(os.getpid(), self._spared_threads))


@dataclass(frozen=True)
class Pulse:
    """What a worker answers a heartbeat. still_s: for how long it has stood still, 0 without anything to do."""

    pid: int
    has_started: bool
    still_s: float


class Worker:
    """The handle to a remote process."""

    def __init__(
        self,
        name: str,
        slot: int,
        host: str,
        strategy: object,
        gpus: float = 1 / SHARES,
        *,
        computes: bool = False,
    ) -> None:
        """slot: the number of its GPU slot. host: an address of the controller's node. strategy: Ray's scheduling.

        gpus: Ray's `num_gpus`; 0 for a process that only inspects its node. computes: whether its calls wait for
        nothing but processors, disks, and calls of others that compute, or it says itself for how long they stand
        still.
        """
        shell: Any = ray.remote(_Shell).options(
            scheduling_strategy=strategy, num_gpus=gpus, num_cpus=0, max_concurrency=_CALLS
        )
        self.name = name
        self.slot = slot
        self.computes = computes
        self._actor: Any = shell.remote()
        self._host = host
        self.watch_refs: list[Ref] = [self._actor.watch.remote()]

    def start(self, target: str, *args: Any) -> Ref:
        """Import `module:Class` in the process and construct it with args; the result is the process id."""
        return self._actor.start.remote(self._host, os.getcwd(), target, *args)

    def call(self, method: str, *args: Any) -> Ref:
        """Call a method; arguments that are references are fetched by the worker's node, not by the caller's.

        A `RemoteCall` is the only argument of its method.
        """
        return self._actor.call.remote(method, *_resolvable(args))

    def call_many(self, count: int, method: str, *args: Any) -> list[Ref]:
        """Call a method whose result has `count` items, each with a reference of its own, so that each moves alone."""
        arguments = _resolvable(args)
        refs = self._actor.call_many.options(num_returns=count).remote(count, method, *arguments)
        return refs if count > 1 else [refs]

    def watch(self, method: str) -> None:
        """Start a method that does not return; from now on the run fails with what it raises."""
        self.watch_refs.append(self.call(method))

    def compute(self, function: str, *args: Any) -> Ref:
        """What `module:function` returns in the process, for the calls of others.

        So one reference stands for what many were needed for: each costs the caller of a call some 10 microseconds.
        """
        return self._actor.compute.remote(function, *args)

    def own_placement(self, gpu: int) -> Ref:
        """The `DevicePlacement` of the process, which uses GPU number `gpu` of its node."""
        return self._actor.own_placement.remote(gpu)

    def pulse(self) -> Ref:
        """A heartbeat, which is answered by a `Pulse`; no answer means that the process hangs.

        It comes at once even when the process is busy.
        """
        return self._actor.pulse.remote()

    def condition(self) -> Ref:
        """The `WorkerCondition` of the process, also while it is busy."""
        return self._actor.condition.remote()

    def read_processes(self, pids: Mapping[int, str]) -> Ref:
        """`diagnosis.stacks.packed_processes_of` on the process's node, also while the process is busy."""
        return self._actor.read_processes.remote(pids)

    @property
    def peer(self) -> Peer:
        """For another worker, which calls this one."""
        return Peer(self._actor)

    def kill(self) -> None:
        ray.kill(self._actor)


@dataclass(frozen=True)
class Peer:
    """A worker as another worker calls it; it can be sent to that one, and does not keep its process alive."""

    actor: Any

    def call(self, method: str, *args: Any) -> Ref:
        """Call a method; the result can be awaited."""
        return self.actor.call.remote(method, *args)


@dataclass(frozen=True)
class RayNode:
    """A node of the Ray cluster that this process has joined, with a worker on it that takes none of its GPUs."""

    address: str
    gpus: int  # as Ray counts them
    worker: Worker


def ray_nodes(host: str) -> list[RayNode]:
    """Every live node; host: an address of this node. A run that holds the GPUs is not disturbed."""
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"]
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            worker = Worker(f"node {address}", 0, host, strategy, gpus=0)
            nodes.append(RayNode(address, int(node["Resources"].get("GPU", 0)), worker))
    return nodes


def answers(calls: Mapping[Ref, str], timeout_s: float) -> dict[str, Any]:
    """By label, what each call returned or the exception that it raised, so that one failure hides no other answer.

    A call that has not returned after timeout_s is a TimeoutError.
    """
    ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    results = {}
    for ref, label in calls.items():
        try:
            results[label] = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            results[label] = TimeoutError("no answer")
        except ray.exceptions.RayTaskError as error:
            results[label] = error.cause or error
        except ray.exceptions.RayError as error:
            results[label] = error
    return results


def failure(ref: Ref) -> Exception | None:
    """The exception of a call that has failed; None for a call that has succeeded or is still running."""
    try:
        ray.get(ref, timeout=_FETCH_S if _is_error_elsewhere(ref) else 0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, UserError | SilentFault) else error
    return None


def _is_error_elsewhere(ref: Ref) -> bool:
    """Whether a call has failed whose error Ray has left on its node, as those of arguments that are lost.

    Results of that size come with the answer of the call.
    """
    location = get_local_object_locations([ref]).get(ref, {})
    size = location.get("object_size")
    return bool(location.get("node_ids")) and size is not None and size < _DIRECT_BYTES


def is_loss(error: Exception) -> bool:
    """Whether a call has failed because its process is gone, or can serve no further call."""
    if isinstance(error, ray.exceptions.RayActorError):
        return True
    return isinstance(getattr(error, "cause", error), ProcessLost)


@contextmanager
def _errors_for_ray() -> Iterator[None]:
    """Shorten an exception, with those that it comes from: Ray leaves a large one on its node, unseen by `ray.wait`.

    A `ProcessLost` stays one. What is raised for want of memory becomes one: the process is of no more use.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(type(error).__name__, memory_use(error)) from None
        if len("".join(traceback.format_exception(error))) <= _ERROR_LETTERS:
            raise
        text = str(error)
        if len(text) <= _ERROR_LETTERS:
            raise error from None
        half = _ERROR_LETTERS // 2
        kind = ProcessLost if isinstance(error, ProcessLost) else RuntimeError
        raise kind(f"{type(error).__name__}: {text[:half]}\n[...]\n{text[-half:]}") from None


def _check_device() -> None:
    """Check this node's devices: the command has checked its own machine, which may have no GPU."""
    for error in device_errors():
        raise error


def _imported(target: str) -> Any:
    """What `module:name` is. Raises UserError where a shared library that the module needs cannot be loaded."""
    module, _, name = target.partition(":")
    try:
        with collector_paused():
            return getattr(importlib.import_module(module), name)
    except OSError as error:
        problem = f"it cannot be imported on node {ray.util.get_node_ip_address()} ({error})"
        hint = (
            "install requirements/gpu.txt there (docs/install.md); megarl doctor names the package"
        )
        raise UserError(module, problem, hint) from error


def _enter(folder: str) -> None:
    """Change to the command's working directory, so that relative paths of a recipe are the same on every node."""
    try:
        os.chdir(folder)
    except OSError as error:
        problem = f"is not on node {ray.util.get_node_ip_address()} ({error.strerror})"
        raise UserError(folder, problem, "start the run in a folder that all nodes share") from None


class Background(Protocol):
    """Work that goes on while the controller waits for other calls, by calls of its own."""

    def labels(self) -> Mapping[Ref, str]:
        """The calls that are open."""
        ...

    def take(self, ended: Sequence[Ref]) -> None:
        """Go on after some of these calls have returned."""
        ...
