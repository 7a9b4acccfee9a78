"""MLflow, by its own client: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and its other variables are obeyed."""

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

from megarl.tracking.trackers.interface import Row, State, TrackedRun
from megarl.types import Metrics

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST_PARAMS = 100  # of one request; MLflow's own bound


class MlflowRun:
    """One run of MLflow, whose id is in the run's folder.

    MLflow adds numbers and takes none back: of a step that is done again after --resume the later one is the run's.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # to the makers of the client
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # it may hold a password
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param = Metric, Param
        self._client: Any = MlflowClient()
        self._run = run

    def open(self) -> str:
        run, client = self._run, self._client
        known = run.known_id("mlflow")
        if known is None:
            known = self._begin()
            run.keep_id("mlflow", known)
        else:  # its parameters stay those that it began with: MLflow lets none be changed
            client.update_run(known, status="RUNNING")
        self._id = known
        client.log_text(known, yaml.safe_dump(dict(run.recipe), sort_keys=False), "recipe.yaml")
        client.set_tag(known, "mlflow.source.git.commit", run.commit)
        return f"this run is {known} in {client.tracking_uri}"

    def _begin(self) -> str:
        client, name = self._client, self._run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else client.create_experiment(name)
        found = client.create_run(number, run_name=self._run.name).info.run_id
        params = [self._param(_name(key), value) for key, value in _flat(self._run.recipe)]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(found, params=params[first : first + _MOST_PARAMS])
        return found

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time_ns() // 10**6
        self._client.log_batch(self._id, [self._metric(_name(key), it, now, step) for key, it in metrics.items()])

    def table(self, step: int, rows: Sequence[Row]) -> None:
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        self._client.log_text(self._id, text.getvalue(), f"samples/step-{step:06d}.csv")

    def close(self, state: State) -> None:
        self._client.set_terminated(self._id, status=_STATUS[state])

    def abandon(self) -> None: ...


def _name(text: str) -> str:
    """A name that MLflow takes: `pass@8` is `pass_at_8` there."""
    return re.sub(r"[^\w\-. :/]", "_", text.replace("@", "_at_"))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and the values as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
