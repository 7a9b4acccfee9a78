"""The bench of adapters: one small run has the figures that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "lora.py"
SMALL = ["--json", "--steps", "2", "--samples", "6", "--longest", "64", "--layers", "2", "--rank", "4"]


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_a_run_on_two_ranks() -> None:
    command = [sys.executable, SCRIPT, *SMALL, "--gpus", "2", "--ep", "2"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout)
    assert found["full_tokens_per_s"] > 0 and found["adapters_tokens_per_s"] > 0 and found["merge_s"] > 0
    assert found["adapters_weights_bytes"] == found["full_weights_bytes"] + found["factors_bytes"]
    trained = found["factors_bytes"] // 4  # float32: a gradient and two moments of each element, but for alignment
    assert trained * 4 <= found["adapters_grads_bytes"] < trained * 5
    assert found["adapters_optimizer_bytes"] < found["full_optimizer_bytes"] / 5
    assert found["merged_reshard_bytes"] > found["full_weights_bytes"], "each engine has all experts"
    assert 0 < found["adapters_reshard_bytes"] < found["merged_reshard_bytes"] / 5
