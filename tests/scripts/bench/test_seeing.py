"""The benches of what it costs to see a run: every figure is there, and a run's own step is what they are shares of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.bench.benches import run


def test_what_every_step_pays_is_told_as_shares_of_a_runs_mean_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = [{"step": 0, "time/step_s": 99.0}, {"step": 1, "time/step_s": 2.0}]
    records.append({"step": 2, "time/step_s": 4.0})
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = run("watching", f"--tokens 20000 --metrics {metrics}")
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    what, milliseconds, shares = zip(*(row.strip("| ").split(" | ") for row in rows), strict=True)
    assert what == (
        "looks for hangs in 3.0 s",
        "100 calls of a worker",
        "differences of 20,000 tokens",
    )
    for cost_ms, share in zip(milliseconds, shares, strict=True):
        assert 0 < float(cost_ms) < 3000
        assert abs(float(share.rstrip("%")) - float(cost_ms) / 30) < 1e-3


def test_a_timelines_spans_and_its_write_are_measured() -> None:
    done = run("timeline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" | ") == 10
    assert "the write of 200000 spans takes " in done.stdout
