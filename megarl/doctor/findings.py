"""Findings: a problem, the nodes that have it, and the mend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.doctor.facts import NodeFacts
from megarl.printable import one_line
from megarl.types import UserFault

Severity = Literal["fault", "warning", "note"]  # a fault must be mended; a warning costs time; a note informs
_ORDER: tuple[Severity, ...] = ("fault", "warning", "note")
_MOST_NAMED = 4  # nodes in one line


@dataclass(frozen=True)
class Finding:
    """where: a device, a package, a path, a variable or a recipe key. nodes: addresses; () where no node is meant."""

    severity: Severity
    where: str
    problem: str
    mend: str
    nodes: tuple[str, ...] = ()

    def line(self, num_nodes: int) -> str:
        """The finding as one line; names its nodes where there are several in all."""
        nodes = f"{_named(self.nodes, num_nodes)}: " if self.nodes and num_nodes > 1 else ""
        return one_line(f"{self.severity}: {nodes}{self.where}: {self.problem}; {self.mend}")


def on_node(node: NodeFacts, severity: Severity, where: str, problem: str, mend: str) -> Finding:
    """A finding of one node."""
    return Finding(severity, where, problem, mend, (node.address,))


def of_faults(faults: Iterable[UserFault]) -> list[Finding]:
    """Faults of megarl's other checks as findings without a node."""
    return [Finding("fault", fault.where, fault.problem, fault.mend) for fault in faults]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes, and sort them by severity."""
    nodes: dict[tuple[Severity, str, str, str], list[str]] = {}
    for finding in findings:
        seen = nodes.setdefault((finding.severity, finding.where, finding.problem, finding.mend), [])
        seen += [node for node in finding.nodes if node not in seen]
    found = [Finding(*key, tuple(addresses)) for key, addresses in nodes.items()]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))  # stable within a severity


def _named(nodes: Sequence[str], num_nodes: int) -> str:
    if len(nodes) == num_nodes:
        return f"all {num_nodes} nodes"
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return f"{', '.join(nodes[:_MOST_NAMED])}{more}"
