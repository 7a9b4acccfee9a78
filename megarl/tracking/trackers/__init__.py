"""Experiment trackers in addition to the run's own JSON lines: TensorBoard, Weights & Biases, MLflow.

A tracker implements `interface.Tracker`; `Trackers` opens the trackers of a recipe and isolates the run from their
failures and delays. Keys of the services come only from their clients' own environment variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from megarl.printable import printable
from megarl.tracking.trackers.interface import SampleRow, State, TrackedRun, Tracker
from megarl.tracking.trackers.mlflow_run import MlflowRun
from megarl.tracking.trackers.tensorboard_file import TensorboardFile
from megarl.tracking.trackers.wandb_run import WandbRun
from megarl.tracking.trackers.writer import Writer, reason
from megarl.types import Metrics

TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardFile,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}
END_S = 60.0  # how long the end of a run waits for all trackers together
EARLY_END_S = 7.0  # the same for a run that is stopped or fails: Slurm kills all processes 30 s after its signal
_LAST_S, _EARLY_LAST_S = 10.0, 1.0  # how long abandoned trackers may then take, together


class Trackers:
    """All trackers of a run. No method raises a tracker's exception, and only `close` waits for trackers."""

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None], end_s: float = END_S) -> None:
        """say: prints a line for the user; called from several threads."""
        self._end_s = end_s
        self._open: dict[str, tuple[Tracker, Writer]] = {}
        for name in dict.fromkeys(names):
            try:
                tracker = TRACKERS[name](run)
            except Exception as error:  # raised by the client's import or start
                say(f"{name}: it does not start, and the run goes on without it ({reason(error)})")
            else:
                self._open[name] = tracker, Writer(name, tracker, say)

    def log(self, step: int, metrics: Metrics) -> None:
        """Send a step's numbers, all but `step` itself."""
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        for tracker, writer in self._open.values():
            if numbers:
                writer.put(f"step {step}", partial(tracker.log, step, numbers))

    def table(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Send a step's samples; hidden characters of their text are escaped."""
        rows = [{key: printable(it) if isinstance(it, str) else it for key, it in row.items()} for row in samples]
        for tracker, writer in self._open.values():
            if rows:
                writer.put(f"the samples of step {step}", partial(tracker.table, step, rows))

    def close(self, state: State) -> None:
        """Send all remaining writes and the run's state, within a time limit whatever a tracker waits for.

        A second signal ends the waiting; trackers that would keep the process from ending are abandoned even then.
        """
        wait_s, last_s = (self._end_s, _LAST_S) if state == "finished" else (EARLY_END_S, _EARLY_LAST_S)
        deadline = time.monotonic() + min(wait_s, self._end_s)
        writers = [writer for _, writer in self._open.values()]
        self._open = {}
        with ExitStack() as cleanup:  # it runs all callbacks even if a signal interrupts one
            cleanup.callback(self._wait_for_last, writers, last_s)
            for writer in writers:
                cleanup.callback(writer.leave)
            for writer in writers:
                writer.end(state)
            for writer in writers:
                writer.join(deadline)

    @staticmethod
    def _wait_for_last(writers: Sequence[Writer], last_s: float) -> None:
        """Wait for abandoned trackers, whose calls mostly fail now: ending their threads may abort the interpreter."""
        deadline = time.monotonic() + last_s
        for writer in writers:
            writer.join(deadline)
