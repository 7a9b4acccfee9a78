"""Which failures are a node's fault, and the file in which the script of a Slurm job reads of them.

A fault (the node died, or its GPU is broken) makes a node bad at once, a suspicion (a process did not start there) when
it comes for the second time. An exception that a process raised is nobody's.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megarl.printable import Say, one_line

if TYPE_CHECKING:  # it imports Ray
    from megarl.cluster.node_slots import ReservedNode

Kind = Literal["fault", "suspicion"]
REPORT_VARIABLE = "MEGARL_BAD_NODES"
_SUSPICIONS = 2  # so many of one node are a fault
# CUDA's texts (cudaGetErrorString) and NVML's for what only a GPU, its links or its driver do. An illegal address and
# an "unspecified launch failure" are not among them: a kernel's own mistake ends so, too.
_OF_HARDWARE = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "system not yet initialized",
    "CUDA error: unknown error",
    "GPU is lost",
    "GPU has fallen off the bus",
    "GPU requires reset",
)


def hardware_error(text: str) -> str | None:
    """What a broken GPU, or one that the driver has lost, is called in an error's text; None where nothing is."""
    for words in _OF_HARDWARE:
        if words in text:
            return words
    return None


def report(node: str, kind: Kind, reason: str) -> None:
    """Write a line of the file that MEGARL_BAD_NODES names, if it names one. node: its name. Raises OSError."""
    if file := os.environ.get(REPORT_VARIABLE):
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(f"{node}\t{kind}\t{one_line(reason)}\n")


class NodeFaults:
    """What the nodes of a run are blamed for. Each is a line of the file that MEGARL_BAD_NODES names, if it names one.

    A line is the node's name, the kind and the reason, with tabs between; scripts/slurm/megarl.sbatch reads it.
    """

    def __init__(self, say: Say) -> None:
        """say: prints a line for the user."""
        self._say = say
        self._faulty: set[str] = set()  # ids of nodes
        self._suspicions: Counter[str] = Counter()

    def note(self, node: ReservedNode, kind: Kind, reason: str) -> None:
        """Report what a node did; a node that is bad already is not reported again."""
        if self.is_bad(node):
            return
        if kind == "fault":
            self._faulty.add(node.node_id)
        else:
            self._suspicions[node.node_id] += 1
        self._say(f"node {node}: {reason}")
        try:
            report(node.name, kind, reason)
        except OSError as error:
            self._say(
                f"{error.filename} cannot be written ({error.strerror}): the job does not exclude the node"
            )

    def is_bad(self, node: ReservedNode) -> bool:
        return node.node_id in self._faulty or self._suspicions[node.node_id] >= _SUSPICIONS
