"""Runs whose processes are hit again and again end as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        ("phases", range(1, 7)),
        # a node dies that has samples of a step that is trained again
        pytest.param("nodes", range(11, 13), marks=pytest.mark.nightly),
        *(
            pytest.param(run, range(6), marks=pytest.mark.nightly)
            for run in ("plain", "ahead", "critic", "lora", "adapters", "episodes")
        ),
    ],
)
def test_a_run_that_is_hit_ends_as_one_that_is_not(tmp_path: Path, run: str, faults: range) -> None:
    """Weights, optimizer, metrics and samples are the same to the last bit, and nothing is left behind."""
    numbers = ["--faults", str(len(faults)), "--from", str(faults[0])]
    command = [sys.executable, ROOT / "scripts" / "chaos.py", "--run", run, *numbers]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results, done.stderr
    faults_done = [result for result in results if "fault" in result]
    assert len(faults_done) == len(faults), done.stderr
    assert not [result for result in faults_done if result["outcome"] == "hung" or result["left"]]
    assert {"recovered", "ended"} & {result["outcome"] for result in faults_done}
    ends = [result["end"] for result in results if "end" in result]
    assert ends and all(end == {"differences": [], "left": []} for end in ends), ends
