"""Runs whose processes are hit again and again end as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
# One number of the run `phases` for each of its 25 pairs of fault and role, chosen for a short recovery in
# docs/bench/chaos.jsonl, and 15 more short ones.
SAMPLE = (
    2, 101, 103, 114, 116, 118, 120, 121, 125, 128, 129, 133, 134, 135, 136, 137, 139, 140, 141, 142,
    143, 156, 160, 161, 168, 200, 201, 217, 220, 222, 223, 227, 228, 235, 237, 238, 239, 241, 242, 252,
)  # fmt: skip


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        ("phases", SAMPLE),
        # a node dies that has samples of a step that is trained again
        pytest.param("nodes", range(11, 13), marks=pytest.mark.nightly),
        *(
            pytest.param(run, range(6), marks=pytest.mark.nightly)
            for run in ("plain", "ahead", "critic", "lora", "adapters", "episodes")
        ),
    ],
)
def test_a_run_that_is_hit_ends_as_one_that_is_not(
    tmp_path: Path, run: str, faults: Sequence[int]
) -> None:
    """Weights, optimizer, metrics and samples are the same to the last bit, and nothing is left behind."""
    # a fault takes a step or two
    steps = max(16, 5 * len(faults) // 3)
    command = [sys.executable, ROOT / "scripts" / "chaos.py", "--run", run, "--steps", str(steps)]
    numbers = ["--numbers", *map(str, faults)]
    done = subprocess.run(
        [*command, *numbers, "--folder", tmp_path], capture_output=True, text=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results, done.stderr
    faults_done = [result for result in results if "fault" in result]
    assert len(faults_done) == len(faults), done.stderr
    assert not [result for result in faults_done if result["outcome"] == "hung" or result["left"]]
    assert {"recovered", "ended"} & {result["outcome"] for result in faults_done}
    ends = [result["end"] for result in results if "end" in result]
    assert ends and all(end == {"differences": [], "left": []} for end in ends), ends
