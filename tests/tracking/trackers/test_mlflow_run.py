"""MLflow's own client and a store in a folder, read back by the client."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tests.tracking.trackers.runs import RECIPE, ROWS, track, tracked


def the_run(experiment: str = "megarl") -> tuple[Any, Run]:
    """A client, and the only run of the experiment."""
    client = MlflowClient()
    stored = client.get_experiment_by_name(experiment)
    assert stored
    (run,) = client.search_runs([stored.experiment_id])
    return client, run


def points(client: Any, run: Run, name: str) -> list[tuple[int, float]]:
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
    ]


def test_a_run_is_read_back(tmp_path: Path, offline: Path) -> None:
    steps = {
        -1: {"warm_start/loss": 2.0},
        1: {"reward/mean": 0.5, "eval/x/pass@8": math.nan},
        2: {"reward/mean": 0.75},
    }
    (line,) = track("mlflow", tracked(tmp_path), steps, table=2)
    client, run = the_run()
    assert line == f"mlflow: this run is {run.info.run_id} in {offline.as_uri()}"
    assert (run.info.run_name, run.info.status) == ("try", "FINISHED")
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert run.data.params == {
        "run.name": "try",
        "run.steps": "4",
        "train.lr": "1e-06",
        "train.sizes": "[1, 2]",
    }
    assert points(client, run, "reward/mean") == [(1, 0.5), (2, 0.75)]
    assert points(client, run, "warm_start/loss") == [(-1, 2.0)]
    ((step, value),) = points(client, run, "eval/x/pass_at_8")
    assert step == 1 and math.isnan(value)
    recipe = Path(client.download_artifacts(run.info.run_id, "recipe.yaml"))
    assert yaml.safe_load(recipe.read_text()) == RECIPE
    with Path(client.download_artifacts(run.info.run_id, "samples/step-000002.csv")).open(
        newline=""
    ) as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert rows[0] == {
        "prompt": "1+1=",
        "response": "2\n\\x1b[2J, or =3",
        "reward": "1.0",
        "correct": "True",
    }


def test_a_resumed_run_is_the_same_one(tmp_path: Path, offline: Path) -> None:
    track("mlflow", tracked(tmp_path), {step: {"reward/mean": 0.5} for step in (1, 2)}, "stopped")
    track("mlflow", tracked(tmp_path, first_step=2), {2: {"reward/mean": 7.0}})
    client, run = the_run()
    assert run.info.status == "FINISHED"
    assert points(client, run, "reward/mean") == [(1, 0.5), (2, 0.5), (2, 7.0)], (
        "MLflow takes nothing back"
    )


def test_more_parameters_than_a_request_takes(tmp_path: Path, offline: Path) -> None:
    many = {f"key@{number}": "x" * 7000 for number in range(201)}
    assert (
        len(track("mlflow", replace(tracked(tmp_path), recipe={"sets": many}), {1: {"a": 1.0}}))
        == 1
    )
    assert len(the_run()[1].data.params) == 201


def test_the_experiment_is_the_recipes_or_the_environments(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    for name, project in (("a", "own"), ("b", None)):
        (tmp_path / name).mkdir()
        track("mlflow", tracked(tmp_path / name, project=project), {1: {"a": 1.0}})
    assert the_run("own")[1].info.run_id != the_run("theirs")[1].info.run_id
