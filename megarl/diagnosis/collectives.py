"""Which collective a process is in, by its Python stacks, and who of a group is missing from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.diagnosis.evidence import Frame, ProcessEvidence

# the files in which a thread is that waits for other ranks; torch's wrapper for logs is around each collective
_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
_WRAPPERS = ("wrapper", "_communicate")
_LIBRARIES = ("torch/", "megatron/core/")


@dataclass(frozen=True)
class Collective:
    """A collective by its function and by the place that has called it."""

    function: str
    caller: Frame | None

    def __str__(self) -> str:
        return f"{self.function}, called by {self.caller}" if self.caller else self.function


def collective_of(process: ProcessEvidence) -> Collective | None:
    """The collective that a thread of the process is in."""
    for thread in process.threads:
        if found := _collective_in(thread.frames):
            return found
    return None


def _collective_in(frames: Sequence[Frame]) -> Collective | None:
    inside = [
        number for number, frame in enumerate(frames) if frame.file.endswith(_COLLECTIVE_FILES)
    ]
    if not inside:
        return None
    functions = [frames[number].name for number in inside if frames[number].name not in _WRAPPERS]
    outside = [frame for frame in frames[inside[-1] + 1 :] if not frame.file.startswith(_LIBRARIES)]
    # the outermost is the one that was called
    function = functions[-1] if functions else frames[inside[-1]].name
    return Collective(function, outside[0] if outside else None)


@dataclass(frozen=True)
class Absence:
    """Some of a group wait in a collective, and others are not in it."""

    collective: Collective
    waiting: Sequence[str]
    missing: Sequence[str]


def absence(members: Mapping[str, Collective | None]) -> Absence | None:
    """Of a group's members, who is missing from the collective that most of the waiting ones are in.

    members: by name, the collective that each is in; None: in no collective.
    """
    waiting = {name: found for name, found in members.items() if found}
    if not waiting:
        return None
    outside = [name for name in members if name not in waiting]
    functions = Counter(waiting.values())
    most, count = functions.most_common(1)[0]
    if outside:
        return Absence(most, [*waiting], outside)
    if len(functions) == 1 or count == 1:
        # all wait for each other in the same way; or each in its own, as in a pipeline
        return None
    elsewhere = [name for name, found in members.items() if found != most]
    there = [name for name, found in members.items() if found == most]
    return Absence(most, there, elsewhere)
