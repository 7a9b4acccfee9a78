"""A finding: what is wrong on which nodes, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.printable import one_line
from megarl.types import UserFault

Severity = Literal["fault", "warning", "note"]  # a fault must be mended; a warning costs time; a note is for the reader
_ORDER: tuple[Severity, ...] = ("fault", "warning", "note")
_MOST_NAMED = 4  # nodes in one line


@dataclass(frozen=True)
class Finding:
    """`where` is a device, a package, a path, a variable or a recipe key; nodes: their addresses, () for all of it."""

    severity: Severity
    where: str
    problem: str
    mend: str
    nodes: tuple[str, ...] = ()

    def line(self, num_nodes: int) -> str:
        """One line; nodes are named where there are several."""
        said = f"{self.severity}: "
        if self.nodes and num_nodes > 1:
            said += f"{_named(self.nodes, num_nodes)}: "
        return one_line(f"{said}{self.where}: {self.problem}; {self.mend}")


def of_faults(faults: Iterable[UserFault]) -> list[Finding]:
    """The faults that other checks of megarl raise, as findings of no single node."""
    return [Finding("fault", fault.where, fault.problem, fault.mend) for fault in faults]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal findings of several nodes as one, the worst first."""
    nodes: dict[tuple[Severity, str, str, str], list[str]] = {}
    for one in findings:
        seen = nodes.setdefault((one.severity, one.where, one.problem, one.mend), [])
        seen += [node for node in one.nodes if node not in seen]
    found = [Finding(*key, tuple(where)) for key, where in nodes.items()]
    return sorted(found, key=lambda one: _ORDER.index(one.severity))  # stable: otherwise as they were found


def _named(nodes: Sequence[str], num_nodes: int) -> str:
    if len(nodes) == num_nodes:
        return f"all {num_nodes} nodes"
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return f"{', '.join(nodes[:_MOST_NAMED])}{more}"
