"""A run's trackers fed as a run does it, and W&B's file read back by its own reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.tracking.trackers import Trackers
from megarl.tracking.trackers.interface import State, TrackedRun
from megarl.types import Metrics

RECIPE = {"run": {"name": "try", "steps": 4}, "train": {"lr": 1e-6, "sizes": [1, 2]}}
ROWS = [
    {"prompt": "1+1=", "response": "2\n\x1b[2J, or =3", "reward": 1.0, "correct": True},
    {"prompt": "1+2=", "response": "é|4", "reward": 0.0, "correct": False},
]


def tracked(folder: Path, first_step: int = 0, project: str | None = None) -> TrackedRun:
    return TrackedRun("try", folder, project, RECIPE, "c0ffee", first_step)


def track(
    name: str,
    run: TrackedRun,
    steps: dict[int, Metrics],
    state: State = "finished",
    table: int = -1,
) -> list[str]:
    """A run of one tracker, with a table at one step; the lines that the user sees."""
    lines: list[str] = []
    trackers = Trackers([name], run, lines.append)
    for step, metrics in steps.items():
        trackers.log(step, {"step": step, **metrics})
        if step == table:
            trackers.table(step, ROWS)
    trackers.close(state)
    return lines


def wandb_records(folder: Path) -> list[list[Any]]:
    """The records of every start of a run in a folder, in the order of the starts."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    from wandb.sdk.internal.datastore import DataStore

    starts = []
    for file in sorted(
        (folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda it: it.stat().st_mtime_ns
    ):
        store = DataStore()
        store.open_for_scan(str(file))
        starts.append([])
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            starts[-1].append(record)
        store.close()
    return starts


def history(records: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows that were logged, without what W&B adds."""
    rows = [
        record.history.item for record in records if record.WhichOneof("record_type") == "history"
    ]
    named = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row}
        for row in rows
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in named]
