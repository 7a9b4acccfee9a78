"""W&B's own client, offline, and its file read back by its own reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tracking.trackers.runs import RECIPE, history, track, tracked, wandb_records


def test_a_run_is_read_back(tmp_path: Path, offline: Path) -> None:
    steps = {
        -1: {"warm_start/loss": 2.0},
        1: {"reward/mean": 0.5, "eval/x/pass@8": math.nan},
        2: {"reward/mean": 0.75},
    }
    assert track("wandb", tracked(tmp_path), steps, table=2) == []
    (records,) = wandb_records(tmp_path)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.git.commit) == ("megarl", "try", "c0ffee")
    assert run.run_id == (tmp_path / "wandb.id").read_text().strip()
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert {**RECIPE, "commit": "c0ffee"}.items() <= config.items()
    first, second, third, table = history(records)
    assert first == {"step": -1, "warm_start/loss": 2.0}
    assert math.isnan(second.pop("eval/x/pass@8")) and second == {"step": 1, "reward/mean": 0.5}
    assert third == {"step": 2, "reward/mean": 0.75}
    assert table["step"] == 2 and table["samples/nrows"] == 2
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    written = json.loads(file.read_text())
    assert written["columns"] == ["prompt", "response", "reward", "correct"]
    assert written["data"][0] == ["1+1=", "2\n\\x1b[2J, or =3", 1.0, True]
    (axis,) = [record.metric for record in records if record.metric.glob_name == "*"]
    assert axis.step_metric == "step", "what the curves are drawn over"


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("stopped", 143)])
def test_the_end_of_a_run_is_told(tmp_path: Path, offline: Path, state: str, code: int) -> None:
    track("wandb", tracked(tmp_path), {1: {"reward/mean": 0.5}}, state)  # type: ignore[arg-type]
    (records,) = wandb_records(tmp_path)
    assert [
        record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"
    ] == [code]


def test_a_resumed_run_is_the_same_one(tmp_path: Path, offline: Path) -> None:
    track("wandb", tracked(tmp_path), {step: {"reward/mean": 0.5} for step in (1, 2, 3)}, "failed")
    track("wandb", tracked(tmp_path, first_step=2), {2: {"reward/mean": 7.0}})
    starts = wandb_records(tmp_path)
    ids = {record.run.run_id for records in starts for record in records if record.run.run_id}
    assert len(starts) == 2 and len(ids) == 1
    assert history(starts[1]) == [{"step": 2, "reward/mean": 7.0}]


@pytest.mark.parametrize(
    ("key", "variable", "project"), [("own", "theirs", "own"), (None, "theirs", "theirs")]
)
def test_the_project_is_the_recipes_or_the_environments(
    tmp_path: Path,
    offline: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    variable: str,
    project: str,
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", variable)
    track("wandb", tracked(tmp_path, project=key), {1: {"reward/mean": 0.5}})
    (records,) = wandb_records(tmp_path)
    assert [record.run.project for record in records if record.run.run_id] == [project]
