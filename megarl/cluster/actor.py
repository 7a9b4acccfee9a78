"""One remote process of a run, from both of its ends. Besides cluster/session.py the only `import ray`."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  isort: skip  (before Ray)
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.topology import DevicePlacement, device_placement
from megarl.cluster.visible_gpus import device_faults
from megarl.device import agree_on_nccl, use_network
from megarl.types import UserFault

Ref = ray.ObjectRef
SHARES = 4  # of a GPU slot
_ERROR_LETTERS = 20_000
_CALLS = 2**20  # at once in a process: a pulse must not wait behind the prompts of an evaluation


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
        agree_on_nccl()
        _enter(folder)
        await loop.run_in_executor(self._thread, _check_device)
        cls = await loop.run_in_executor(self._thread, lambda: getattr(_imported(module), name))
        with _short_errors():
            self._target = await loop.run_in_executor(self._thread, lambda: cls(*args))
        self._is_made.set()
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        await self._is_made.wait()
        function = getattr(self._target, method)
        args = tuple(chain.from_iterable(one.values if isinstance(one, _Together) else (one,) for one in args))
        with _short_errors():
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

    async def device_placement(self, gpu: int) -> DevicePlacement:
        return device_placement(gpu, ray.util.get_node_ip_address())

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def pulse(self) -> int:
        return os.getpid()  # by the loop, whatever its thread is at


class Worker:
    """One remote process."""

    def __init__(self, name: str, slot: int, host: str, strategy: object, gpus: float = 1 / SHARES) -> None:
        """slot: of the GPU; host: an address of the node from which the run is led; strategy: Ray's, where it goes.

        gpus: how much of a GPU it takes from Ray's count; 0 for a process that only looks at its node.
        """
        options: dict[str, Any] = {"num_gpus": gpus, "num_cpus": 0, "max_concurrency": _CALLS}
        actor: Any = ray.remote(_Shell).options(scheduling_strategy=strategy, **options).remote()
        self.name, self.slot, self._actor, self._host = name, slot, actor, host
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

    def device_placement(self, gpu: int) -> Ref:
        """Where it sits: a `DevicePlacement` of its node, as the process that uses the node's GPU number `gpu`."""
        return self._actor.device_placement.remote(gpu)

    def pulse(self) -> Ref:
        """The process id, at once whatever the process is busy with: no answer means that it stands still."""
        return self._actor.pulse.remote()

    def kill(self) -> None:
        ray.kill(self._actor)


@dataclass(frozen=True)
class RayNode:
    """A node of the Ray cluster that this process has joined, with a worker on it that takes none of its GPUs."""

    address: str
    gpus: int  # that Ray was told of
    worker: Worker


def ray_nodes(host: str) -> list[RayNode]:
    """Every node that lives; host: an address of this process's own. A run that holds the GPUs is not disturbed."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            address, gpus = node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0))
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            found.append(RayNode(address, gpus, Worker(f"node {address}", 0, host, strategy, gpus=0)))
    return found


def answers(calls: Mapping[Ref, str], timeout_s: float) -> dict[str, Any]:
    """By label what each call returned, or in its place the exception: a node that fails keeps no other from answering.

    After timeout_s a call that has not returned is a TimeoutError.
    """
    ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    return {label: _answer(ref) for ref, label in calls.items()}


def _answer(ref: Ref) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return TimeoutError("no answer")
    except ray.exceptions.RayTaskError as error:
        return error.cause or error
    except ray.exceptions.RayError as error:
        return error


def failure(ref: Ref) -> Exception | None:
    """Why a call has failed; None where it has not, or has not ended."""
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, UserFault) else error
    except ray.exceptions.RayError as error:
        return error
    return None


class Pulses:
    """Asks each worker from time to time whether it lives, and knows for how long it has not answered.

    A silence is counted in periods in which this process itself has looked: if everything is suspended together, with a
    laptop or by Slurm, nobody was silent. What a call of a worker takes does not count.
    """

    def __init__(self, bound_s: float) -> None:
        """bound_s: the silence that is to be noticed; looks are a tenth of it apart, and 10 s at most."""
        self._period_s = max(0.1, min(10.0, bound_s / 10))
        self._looked_at = -math.inf
        self._asked: dict[Worker, Ref] = {}
        self._missed: Counter[Worker] = Counter()
        self._pids: dict[Worker, int] = {}

    def look(self, workers: Sequence[Worker]) -> None:
        """See who has answered, and ask again, once a period."""
        if time.monotonic() - self._looked_at < self._period_s:
            return
        self._looked_at = time.monotonic()
        self._missed.update(self.unanswered())
        self.ask(workers)

    def ask(self, workers: Sequence[Worker]) -> None:
        """Ask everyone who does not owe an answer."""
        silent = {*self.unanswered()}
        for worker in workers:
            if worker in silent:
                continue
            if worker in self._asked and worker not in self._pids:
                with suppress(ray.exceptions.RayError):
                    self._pids[worker] = ray.get(self._asked[worker])
            self._missed[worker], self._asked[worker] = 0, worker.pulse()

    def unanswered(self) -> list[Worker]:
        """Who owes an answer; of a process that is gone nothing is expected."""
        if not self._asked:
            return []
        waiting = {*ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)[1]}
        return [worker for worker, ref in self._asked.items() if ref in waiting]

    def silence_s(self, worker: Worker) -> float:
        """For how long it has not answered, in whole periods."""
        return self._missed[worker] * self._period_s

    def answered(self) -> list[Worker]:
        """Whose process id is known, whether it lives or not."""
        return list(self._pids)

    def pid(self, worker: Worker) -> int | None:
        """None: it has never answered."""
        return self._pids.get(worker)


@contextmanager
def _short_errors() -> Iterator[None]:
    """Cut what is raised: Ray leaves a large error on its node, where who only waits does not see it."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if len(text) <= _ERROR_LETTERS:
            raise
        half = _ERROR_LETTERS // 2
        raise RuntimeError(f"{type(error).__name__}: {text[:half]}\n[...]\n{text[-half:]}") from None


def _check_device() -> None:
    """Of this node: what the command has checked is the machine where it runs, which may have no GPU."""
    for fault in device_faults():
        raise fault


def _imported(module: str) -> Any:
    """Import a module. Raises UserFault where a shared library that it needs cannot be loaded."""
    try:
        return importlib.import_module(module)
    except OSError as error:
        problem = f"it cannot be imported on node {ray.util.get_node_ip_address()} ({error})"
        mend = "install requirements/gpu.txt there (docs/install.md); megarl doctor names the package"
        raise UserFault(module, problem, mend) from error


def _enter(folder: str) -> None:
    """Make the paths of a recipe mean on every node what they mean to the command."""
    try:
        os.chdir(folder)
    except OSError as error:
        problem = f"is not on node {ray.util.get_node_ip_address()} ({error.strerror})"
        raise UserFault(folder, problem, "start the run in a folder that all nodes share") from None
