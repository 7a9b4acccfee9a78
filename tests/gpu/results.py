"""A plugin of pytest (`-p tests.gpu.results`): each test's outcome and figures, as a line of JSON when it ends.

So a tier that is ended by its time limit leaves what it has found.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "MEGARL_GPU_RESULTS"  # names the file


def pytest_collection_finish(session: pytest.Session) -> None:
    """The first line: the names of all tests that are to run."""
    _append({"collected": [item.nodeid for item in session.items]})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test; of set-up and clean-up only what went wrong, or was skipped."""
    if report.when != "call" and report.outcome == "passed":
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "reason": _reason(report),
        "figures": dict(report.user_properties),
    }
    _append(line)


def _append(line: dict[str, Any]) -> None:
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped, or the line of its failure."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.strip().splitlines()[0] if crash and crash.message else ""
