"""What is known of a run that hangs: its phase, workers, processes with their stacks, and nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.diagnosis.phases import Phase
from megarl.types.conditions import WorkerCondition

_STILL_SHARE = 0.03  # of a processor: a process that uses less stands still
STOPPED = "T"  # Linux's state of a process that a signal has stopped
RAYLET = "raylet"  # the name of Ray's process on each node, and of its evidence
SCHEDULER = "scheduler"  # the title of an engine's SGLang processes
_FULL = 0.9  # of an object store


@dataclass(frozen=True)
class Frame:
    """A Python function that has not returned, with its class. file: short, from its package on."""

    function: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """Of the function alone."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class ThreadStack:
    """A thread's frames, the innermost first."""

    name: str
    frames: Sequence[Frame]


@dataclass(frozen=True)
class ProcessEvidence:
    """A process of a worker: its own, or one that it has started.

    title: of its command. worker: the name of the worker; is_own: whether it is the worker's own. state: Linux's
    letter. cpu_share: of one processor, while it was looked at. problem: why there are no stacks. node: its address.
    """

    pid: int
    title: str
    worker: str
    is_own: bool
    state: str
    cpu_share: float
    threads: Sequence[ThreadStack] = ()
    problem: str = ""
    node: str = ""

    @property
    def is_stopped(self) -> bool:
        return self.state == STOPPED

    @property
    def is_still(self) -> bool:
        """Whether it uses no processor."""
        return self.cpu_share < _STILL_SHARE


@dataclass(frozen=True)
class WorkerEvidence:
    """A worker, as the controller knows it.

    is_awaited: whether the controller waits for a call of it. condition: None where it gave no answer.
    """

    name: str
    node: str
    pid: int | None
    is_awaited: bool
    condition: WorkerCondition | None

    @property
    def group(self) -> str:
        """The name of all workers that do the same."""
        return re.sub(r"\d+", "*", self.name)


@dataclass(frozen=True)
class NodeEvidence:
    """A node. store_share: how full its object store is. problem: why its processes could not be looked at.

    is_dead: whether Ray has given it up, or its raylet accepts no connection.
    """

    address: str
    store_share: float | None = None
    problem: str = ""
    is_dead: bool = False

    @property
    def is_store_full(self) -> bool:
        return self.store_share is not None and self.store_share >= _FULL


@dataclass(frozen=True)
class Evidence:
    """All that was found. reason: why it was looked for. phase: None between two phases; seconds: of the phase.

    verdict: by which the run is about to end, "" where it goes on. is_certain: whether that names what is to blame.
    """

    reason: str
    phase: Phase | None
    seconds: float
    workers: Sequence[WorkerEvidence]
    processes: Sequence[ProcessEvidence]
    nodes: Sequence[NodeEvidence]
    verdict: str = ""
    is_certain: bool = False

    @property
    def awaited(self) -> Sequence[WorkerEvidence]:
        return [worker for worker in self.workers if worker.is_awaited]

    @property
    def own_processes(self) -> Mapping[str, ProcessEvidence]:
        """By worker, its own process, without those that it has started."""
        return {process.worker: process for process in self.processes if process.is_own}
