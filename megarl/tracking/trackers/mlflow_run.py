"""The MLflow tracker. Its client reads MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and other variables."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from megarl.tracking.trackers.interface import SampleRow, State, TrackedRun, Tracker
from megarl.types import Metrics

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST_PARAMS = 100  # in one request; MLflow's own limit


class MlflowRun(Tracker):
    """One run of MLflow, whose id is in the run's folder.

    MLflow cannot remove numbers: for a step that is repeated after --resume the later ones count.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # it may hold a password
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._param = Param
        self._client: Any = MlflowClient()
        self._run = run

    def open(self) -> str:
        run = self._run
        client = self._client
        self._id = run.id_of("mlflow", self._begin)
        client.update_run(self._id, status="RUNNING")  # an earlier start has set another status
        client.log_text(self._id, yaml.safe_dump(dict(run.recipe), sort_keys=False), "recipe.yaml")
        client.set_tag(self._id, "mlflow.source.git.commit", run.commit)
        return f"this run is {self._id} in {client.tracking_uri}"

    def _begin(self) -> str:
        """Create the run with its parameters, which MLflow cannot change at a later start; returns its id."""
        client = self._client
        name = self._run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
        experiment = client.get_experiment_by_name(name)
        if experiment:
            number = experiment.experiment_id
        else:
            number = client.create_experiment(name)
        run_id = client.create_run(number, run_name=self._run.name).info.run_id
        params = [self._param(_name(key), value) for key, value in _flat(self._run.recipe)]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time_ns() // 10**6
        self._client.log_batch(
            self._id, [self._metric(_name(key), value, now, step) for key, value in metrics.items()]
        )

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        self._client.log_text(self._id, text.getvalue(), f"samples/step-{step:06d}.csv")

    def close(self, state: State) -> None:
        self._client.set_terminated(self._id, status=_STATUS[state])


def _name(text: str) -> str:
    """The name in characters that MLflow allows: `pass@8` becomes `pass_at_8`."""
    return re.sub(r"[^\w\-. :/]", "_", text.replace("@", "_at_"))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as text) of all leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
