"""What the tests of GPU paths share. They import what they test and nothing more: see docs/gpu/README.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Record = Callable[[str, float, str], None]


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Keep a figure that the test measured for the page of results: its name, its value and its unit."""

    def keep(name: str, value: float, unit: str) -> None:
        record_property(name, [value, unit])
        print(f"{name}: {value:.6g} {unit}")

    return keep


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append each test's outcome to the file that scripts/gpu_check.sh names, so that a killed tier leaves a page."""
    file = os.environ.get("MEGARL_GPU_RESULTS")
    is_told = report.when == "call" or report.outcome != "passed"  # of set-up and clean-up only what went wrong
    if not file or not is_told:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "reason": reason.strip().splitlines()[-1:] if reason else [],
        "figures": dict(report.user_properties),
    }
    with Path(file).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
