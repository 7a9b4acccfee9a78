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
# Numbers of the run `phases` that recover soon (docs/bench/chaos.jsonl): one for each of its pairs of fault and role,
# and 20 more. Those that take long are hit by night: a scheduler that is stopped or without memory, a keeper that is
# stopped, and what ends the run, a raylet and a worker that Ray holds ready.
SAMPLE = (
    5, 7, 103, 112, 114, 118, 119, 120, 121, 126, 129, 132, 133, 136, 137, 141, 144, 156, 160, 161,
    168, 200, 213, 217, 219, 220, 222, 227, 228, 230, 232, 235, 237, 238, 239, 241, 242, 259, 276, 286,
)  # fmt: skip


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        ("phases", SAMPLE),
        # those that the sample leaves out
        pytest.param("phases", (128, 134, 139, 140, 285), marks=pytest.mark.nightly),
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
    # a fault takes a step or two, and a run whose steps are used up is followed by another
    steps = max(16, 9 * len(faults) // 4)
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
