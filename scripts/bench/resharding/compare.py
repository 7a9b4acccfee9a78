"""The methods side by side: the same processes, the same weights, repetition by repetition in turn."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch

from megarl.device import address_of, host_store

from . import process, wire
from .case import Case

METHODS = ("megarl", "gather", "megatron_core")


class World:
    """The processes of one case, forked from this one, and reaped whatever happens."""

    def __init__(self, case: Case, round_bytes: int, bucket_bytes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes, self._pipes = [], []
        for rank in range(case.num_processes):
            ours, theirs = context.Pipe()
            args = theirs, case, rank, round_bytes, bucket_bytes
            work = context.Process(target=process.main, args=args, daemon=True)
            work.start()
            theirs.close()
            self._processes.append(work)
            self._pipes.append(ours)
        # only now: it has threads, which a fork does not take along
        self._store = host_store(process.TIMEOUT_S)
        for pipe in self._pipes:
            pipe.send(address_of(self._store))
        self._answers()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._processes:
            child.kill()
            child.join()

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Run one command on all ranks at once; what each answered."""
        for pipe in self._pipes:
            pipe.send((command, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers_by_rank: dict[int, Any] = {}
        while len(answers_by_rank) < len(self._pipes):
            waiting = {
                pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers_by_rank
            }
            ready = wait(list(waiting), timeout=process.TIMEOUT_S)
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} did not answer in {process.TIMEOUT_S} s"
                )
            for pipe in ready:
                good, answers_by_rank[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                if not good:
                    raise RuntimeError(f"rank {waiting[pipe]}:\n{answers_by_rank[waiting[pipe]]}")  # type: ignore[index]
        return [answers_by_rank[rank] for rank in range(len(self._pipes))]


class Figures(NamedTuple):
    """What was measured of one method; lists are by rank, seconds by repetition."""

    plan_s: float
    received: list[list[int]]  # [rank][peer]
    control_bytes: int
    loopback_bytes: int
    memory: list[int]
    seconds: list[float]
    exact: bool

    def wire_bytes(self) -> list[int]:
        return [sum(row) for row in self.received]

    def inter_node_bytes(self, case: Case) -> list[int]:
        return [
            sum(size for peer, size in enumerate(row) if case.node(peer) != case.node(rank))
            for rank, row in enumerate(self.received)
        ]


def _run(world: World, name: str) -> tuple[float, bool]:
    """One repetition: seconds from the first start to the last end, and whether all came out exact."""
    world.call("forget", name)
    spans = world.call("run", name)
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    return seconds, all(world.call("is_exact", name))


def _measure(world: World, name: str) -> Figures:
    """Plan, warm up, then one run each for the bytes and for the memory."""
    plan_s = max(world.call("plan", name))
    _, exact = _run(world, name)
    before, loopback = world.call("sockets"), wire.loopback_bytes()
    _, also_exact = _run(world, name)
    loopback, after = wire.loopback_bytes() - loopback, world.call("sockets")
    counted = wire.traffic(before, after)
    world.call("forget", name)
    memory = world.call("run_for_memory", name)
    exact = exact and also_exact and all(world.call("is_exact", name))
    return Figures(plan_s, counted.received, counted.control, loopback, memory, [], exact)


def compare(case: Case, repeats: int, round_bytes: int, bucket_bytes: int) -> dict[str, Figures]:
    """All methods on one case, repetition by repetition in turn."""
    torch.set_num_threads(1)  # there are as many processes as they come
    with World(case, round_bytes, bucket_bytes) as world:
        figures = {name: _measure(world, name) for name in METHODS}
        for repeat in range(repeats):
            for turn in range(len(METHODS)):  # each is first, second and last as often
                name = METHODS[(repeat + turn) % len(METHODS)]
                seconds, exact = _run(world, name)
                figures[name].seconds.append(seconds)
                figures[name] = figures[name]._replace(exact=exact and figures[name].exact)
    return figures
