"""Experiment trackers beside the run's own JSON lines: TensorBoard, Weights & Biases, MLflow.

A tracker is a class of `interface.Tracker`; `Trackers` opens those that a recipe names and keeps their failures and
their slowness away from the run. Keys of the services come from their clients' own environment variables alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from megarl.printable import printable
from megarl.tracking.trackers.interface import Row, State, TrackedRun, Tracker
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
EARLY_END_S = 7.0  # the same of one that is stopped or fails: Slurm kills what is there 30 s after its signal
_LAST_S, _EARLY_LAST_S = 10.0, 1.0  # that those which are left then have for their last calls, together


class Trackers:
    """Every tracker of a run. No method raises what a tracker raises, and none but `close` waits for one."""

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None], end_s: float = END_S) -> None:
        """say: how a line reaches the user; called from several threads."""
        self._end_s = end_s
        self._open: dict[str, tuple[Tracker, Writer]] = {}
        for name in dict.fromkeys(names):
            try:
                tracker = TRACKERS[name](run)
            except Exception as error:  # of the client's own import and start
                say(f"{name}: it does not start, and the run goes on without it ({reason(error)})")
            else:
                self._open[name] = tracker, Writer(name, tracker, say)

    def log(self, step: int, metrics: Metrics) -> None:
        """A step's numbers, all but `step` itself."""
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        for tracker, writer in self._open.values():
            if numbers:
                writer.put(f"step {step}", partial(tracker.log, step, numbers))

    def table(self, step: int, samples: Sequence[Row]) -> None:
        """A step's samples; of their text, what a reader would not see is escaped."""
        rows = [{key: printable(it) if isinstance(it, str) else it for key, it in row.items()} for row in samples]
        for tracker, writer in self._open.values():
            if rows:
                writer.put(f"the samples of step {step}", partial(tracker.table, step, rows))

    def close(self, state: State) -> None:
        """Send what is left and say how the run ended; at most for so long, whatever a tracker waits for.

        A second signal in the meantime ends the waiting; what would keep the process from ending is let go of even so.
        """
        wait_s, last_s = (self._end_s, _LAST_S) if state == "finished" else (EARLY_END_S, _EARLY_LAST_S)
        deadline = time.monotonic() + min(wait_s, self._end_s)
        writers = [writer for _, writer in self._open.values()]
        self._open = {}
        with ExitStack() as left:  # which goes on with the others where a signal interrupts one
            left.callback(self._wait_for_last, writers, last_s)
            for writer in writers:
                left.callback(writer.leave)
            for writer in writers:
                writer.end(state)
            for writer in writers:
                writer.join(deadline)

    @staticmethod
    def _wait_for_last(writers: Sequence[Writer], last_s: float) -> None:
        """Calls of abandoned trackers mostly fail now; a thread that the interpreter ends may abort it."""
        deadline = time.monotonic() + last_s
        for writer in writers:
            writer.join(deadline)
