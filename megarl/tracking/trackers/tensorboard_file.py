"""The TensorBoard tracker, which writes an event file in the run's folder."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import yaml

from megarl.tracking.appended_files import AppendedFile
from megarl.tracking.trackers.interface import SampleRow, State, TrackedRun, Tracker
from megarl.types import Metrics


class TensorboardFile(Tracker):
    """A new event file in the folder `events`, with a name that TensorBoard recognises."""

    def __init__(self, run: TrackedRun) -> None:
        """TensorBoard ignores the steps of earlier files from the run's first step on."""
        from tensorboard.compat.proto import (
            event_pb2,
            summary_pb2,
            tensor_pb2,
            tensor_shape_pb2,
            types_pb2,
        )
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Classes that are generated at import.
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2.TensorProto  # type: ignore[attr-defined]
        self._shape: Any = tensor_shape_pb2.TensorShapeProto  # type: ignore[attr-defined]
        self._string: Any = types_pb2.DT_STRING  # type: ignore[attr-defined]
        self._text: Any = metadata.create_summary_metadata(None, None)

        folder = run.folder / "events"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(folder.glob(f"{name}.*")))
        self._run = run
        self._record_writer: Any = RecordWriter
        path = folder / f"{name}.{number}"
        path.touch(exist_ok=False)
        self._file = AppendedFile(path)
        self._write(file_version="brain.Event:2")

    def open(self) -> str:
        run = self._run
        if run.first_step > 0:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=run.first_step, session_log=start)
        recipe = yaml.safe_dump(dict(run.recipe), sort_keys=False)
        # Markdown's block of code
        indented = "".join(f"    {line}\n" for line in recipe.splitlines())
        self._strings(run.first_step, "recipe", [[indented]])
        self._strings(run.first_step, "commit", [[run.commit]])
        return ""

    def log(self, step: int, metrics: Metrics) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._strings(
            step,
            "samples",
            [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)],
        )

    def close(self, state: State) -> None:
        self._file.write()

    def _strings(self, step: int, tag: str, table: list[list[str]]) -> None:
        """Write text; TensorBoard shows several rows as a table with the first row as its head."""
        sizes = [len(table), len(table[0])]
        shape = self._shape(dim=[self._shape.Dim(size=size) for size in sizes])
        cells = [cell.encode() for row in table for cell in row]
        tensor = self._tensor(dtype=self._string, tensor_shape=shape, string_val=cells)
        value = self._summary.Summary.Value(tag=tag, metadata=self._text, tensor=tensor)
        self._write(step=step, summary=self._summary.Summary(value=[value]))

    def _write(self, **fields: Any) -> None:
        """Append an event. Raises OSError: then it is written before the next one."""
        event = self._event.Event(wall_time=time.time(), **fields)
        data = io.BytesIO()
        self._record_writer(data).write(event.SerializeToString())
        # half a record would end the file for TensorBoard
        self._file.put(event.step, data.getvalue())
        self._file.write()
