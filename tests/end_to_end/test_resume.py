"""A run that is killed again and again ends as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POINTS = 10

pytestmark = pytest.mark.slow


def test_ten_kills_leave_no_trace(tmp_path: Path) -> None:
    """SIGKILL while everything starts, in rollouts, updates, saves and reshards: to the last bit the same end."""
    command = [sys.executable, str(ROOT / "scripts" / "soak_resume.py"), "--points", str(POINTS), "--seed", "1"]
    done = subprocess.run([*command, "--folder", str(tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["killed"]) == POINTS
    assert all(one.startswith("killed") for one in report["killed"]), "each of them was still running"
    assert report["differences"] == []
    log = (tmp_path / "disturbed.log").read_text()
    assert "this run goes on after step" in log
