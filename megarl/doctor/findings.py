"""Findings, each a problem, the nodes that have it, and the hint; and the doctor's report of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Literal

from megarl.doctor.facts import NodeFacts, RankRates
from megarl.printable import one_line
from megarl.types import UserError

# an error must be corrected; a warning costs time; a note informs
Severity = Literal["error", "warning", "note"]
Problem = tuple[Severity, str, str, str]  # of a node: severity, where, problem, mend, as in Finding
Problems = Iterator[Problem]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")
_MOST_NAMED = 4  # nodes in one line


@dataclass(frozen=True)
class Finding:
    """where: a device, a package, a path, a variable or a recipe key. nodes: addresses; () where no node is meant."""

    severity: Severity
    where: str
    problem: str
    hint: str
    nodes: tuple[str, ...] = ()

    def line(self, num_nodes: int) -> str:
        """The finding as one line; names its nodes where there are several in all."""
        line = f"{self.where}: {self.problem}; {self.hint}"
        if self.nodes and num_nodes > 1:
            names = ", ".join(self.nodes[:_MOST_NAMED])
            if len(self.nodes) > _MOST_NAMED:
                names += f" and {len(self.nodes) - _MOST_NAMED} more"
            if len(self.nodes) == num_nodes:
                names = f"all {num_nodes} nodes"
            line = f"{names}: {line}"
        return one_line(f"{self.severity}: {line}")


@dataclass(frozen=True)
class Report:
    """findings: sorted by severity. hardware_file: "" where nothing was measured."""

    nodes: Sequence[NodeFacts]
    findings: Sequence[Finding]
    rates: Sequence[RankRates] = ()
    hardware_file: str = ""

    @property
    def exit_code(self) -> int:
        if any(finding.severity == "error" for finding in self.findings):
            return 2
        return 0

    def lines(self) -> list[str]:
        """A line for each finding, then a summary."""
        lines = [finding.line(len(self.nodes)) for finding in self.findings]
        if self.hardware_file:
            lines.append(
                f"measured: {self.hardware_file}, for megarl plan RECIPE --hardware {self.hardware_file}"
            )
        kinds = Counter(gpu.name for node in self.nodes for gpu in node.gpus)
        gpus = " and ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU"
        counts = Counter(finding.severity for finding in self.findings)
        outcome = "nothing must be corrected"
        if counts["error"]:
            outcome = f"{_counted(counts['error'], 'error')} to correct"
        warnings = _counted(counts["warning"], "warning")
        nodes = _counted(len(self.nodes), "node")
        return [*lines, f"megarl doctor: {nodes}, {gpus}: {outcome}, {warnings}"]

    def to_json(self) -> str:
        """The report as a JSON object; `facts` has all facts of the nodes."""
        tree = asdict(self)
        return json.dumps(
            {
                "exit_code": self.exit_code,
                "findings": tree["findings"],
                "hardware_file": self.hardware_file or None,
                "rates": tree["rates"],
                "facts": tree["nodes"],
            }
        )


def of_node(node: NodeFacts, *problems: Problems) -> list[Finding]:
    """Several rules' problems as findings of a node."""
    return [Finding(*problem, (node.address,)) for problem in chain.from_iterable(problems)]


def of_errors(errors: Iterable[UserError]) -> list[Finding]:
    """Errors of megarl's other checks as findings without a node."""
    return [Finding("error", error.where, error.problem, error.hint) for error in errors]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes, and sort them by severity."""
    nodes_of: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        addresses = nodes_of.setdefault(replace(finding, nodes=()), {})
        addresses |= dict.fromkeys(finding.nodes)
    once = [replace(finding, nodes=tuple(nodes)) for finding, nodes in nodes_of.items()]
    # stable within a severity
    return sorted(once, key=lambda finding: _ORDER.index(finding.severity))


def gb(num_bytes: float) -> str:
    """Bytes as text, with two significant digits, in GB of 10^9 bytes."""
    value = num_bytes / 1e9
    if value >= 10:
        return f"{value:.0f} GB"
    return f"{float(f'{value:.2g}'):g} GB"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
