"""The doctor's report, as lines for a terminal and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from megarl.doctor.facts import NodeFacts
from megarl.doctor.findings import Finding
from megarl.doctor.rates import RankRates


@dataclass(frozen=True)
class Report:
    """findings: sorted by severity. hardware_file: "" where nothing was measured."""

    nodes: Sequence[NodeFacts]
    findings: Sequence[Finding]
    rates: Sequence[RankRates] = field(default_factory=tuple)
    hardware_file: str = ""

    @property
    def exit_code(self) -> int:
        return 2 if any(finding.severity == "fault" for finding in self.findings) else 0

    def lines(self) -> list[str]:
        """A line for each finding, then a summary."""
        found = [finding.line(len(self.nodes)) for finding in self.findings]
        if self.hardware_file:
            found.append(f"measured: {self.hardware_file}, for megarl plan RECIPE --hardware {self.hardware_file}")
        return [*found, f"megarl doctor: {self._seen()}: {self._verdict()}"]

    def to_json(self) -> str:
        """The report as a JSON object; `facts` has all facts of the nodes."""
        tree = {
            "exit_code": self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
            "hardware_file": self.hardware_file or None,
            "rates": [asdict(rank) for rank in self.rates],
            "facts": [asdict(node) for node in self.nodes],
        }
        return json.dumps(tree)

    def _seen(self) -> str:
        kinds = Counter(gpu.name for node in self.nodes for gpu in node.gpus)
        gpus = " and ".join(f"{count} x {name}" for name, count in kinds.items()) or "no GPU"
        return f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}, {gpus}"

    def _verdict(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        faults, warnings = counts["fault"], counts["warning"]
        verdict = f"{faults} fault{'s' * (faults != 1)} to mend" if faults else "nothing must be mended"
        return f"{verdict}, {warnings} warning{'s' * (warnings != 1)}"
