"""TensorBoard's event file, written in the caller's thread, where an error of the disk is the caller's to tell."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from megarl.types import Metrics


class Events:
    """One new file of scalars in a folder, where TensorBoard looks for names that begin so."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """first_step: if above 0, what earlier files of the folder have from there on is void. Raises OSError."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # an extra of the package
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2  # classes that are made when the module is imported
        self._summary: Any = summary_pb2

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(folder.glob(f"{name}.*")))
        self._file = (folder / f"{name}.{number}").open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if first_step > 0:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=first_step, session_log=start)

    def add(self, metrics: Metrics, step: int) -> None:
        """Write the scalars of a step, all but `step` itself. Raises OSError."""
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items() if name != "step"]
        self._write(step=step, summary=self._summary.Summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()
