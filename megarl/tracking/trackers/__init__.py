"""Experiment trackers in addition to the run's own JSON lines: TensorBoard, Weights & Biases, MLflow.

A tracker implements `interface.Tracker`; `Trackers` opens the trackers of a recipe and isolates the run from their
failures and delays. Keys of the services come only from their clients' own environment variables.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import Any

from megarl.printable import Say, json_line, one_line, printable
from megarl.tracking.secrets import redacted
from megarl.tracking.trackers.interface import SampleRow, State, TrackedRun, Tracker
from megarl.tracking.trackers.mlflow_run import MlflowRun
from megarl.tracking.trackers.tensorboard_file import TensorboardFile
from megarl.tracking.trackers.wandb_run import WandbRun
from megarl.types import Metrics

TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardFile,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}
END_S = 60.0  # how long the end of a run waits for all trackers together
# the same for a run that is stopped or fails: Slurm kills all processes 30 s after its signal
EARLY_END_S = 7.0
_LAST_S = 10.0
_EARLY_LAST_S = 1.0  # how long abandoned trackers may then take, together
_MOST_WAITING = 1000  # writes in the queue of a tracker; further ones are dropped

_Call = tuple[str, Callable[[], None]]  # (description of the write, function that writes)


class Trackers:
    """All trackers of a run. No method raises a tracker's exception, and only `close` waits for trackers."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        say: Say,
        end_s: float = END_S,
    ) -> None:
        """say: prints a line for the user; called from several threads."""
        self._end_s = end_s
        self._writers: list[Writer] = []
        for name in dict.fromkeys(names):
            try:
                tracker = TRACKERS[name](run)
            except Exception as error:  # raised by the client's import or start
                say(f"{name}: it does not start, and the run goes on without it ({_reason(error)})")
            else:
                self._writers.append(Writer(name, tracker, say))

    def log(self, step: int, metrics: Metrics) -> None:
        """Send a step's numbers, all but `step` itself."""
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        for writer in self._writers if numbers else ():
            writer.put(f"step {step}", partial(writer.tracker.log, step, numbers))

    def table(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Send a step's samples; hidden characters of their text are escaped, and an episode is one line of JSON."""
        columns = dict.fromkeys(key for row in samples for key in row)
        rows = [{key: _cell(row.get(key, "")) for key in columns} for row in samples]
        for writer in self._writers if rows else ():
            writer.put(f"the samples of step {step}", partial(writer.tracker.table, step, rows))

    def close(self, state: State) -> None:
        """Send all remaining writes and the run's state, within a time limit whatever a tracker waits for.

        A second signal ends the waiting; trackers that would keep the process from ending are abandoned even then.
        """
        wait_s, last_s = (
            (self._end_s, _LAST_S) if state == "finished" else (EARLY_END_S, _EARLY_LAST_S)
        )
        deadline = time.monotonic() + min(wait_s, self._end_s)
        writers = self._writers
        self._writers = []
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


class Writer:
    """Calls one tracker, so that neither its network nor its errors reach the run.

    The thread is a daemon: a call that never returns does not keep the process from ending.
    """

    def __init__(self, name: str, tracker: Tracker, say: Say) -> None:
        self._name = name
        self.tracker = tracker
        self._say = say
        self._calls: queue.Queue[_Call | None] = queue.Queue()
        self._has_failed = False
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, what: str, call: Callable[[], None]) -> None:
        """Queue a write; returns at once."""
        if self._calls.qsize() >= _MOST_WAITING:
            self._fail(f"{what} is left out, {_MOST_WAITING} writes are waiting already")
        elif self._thread.is_alive():  # it has ended if the tracker could not be opened
            self._calls.put((what, call))

    def end(self, state: State) -> None:
        """Queue the run's end after all waiting writes; returns at once."""
        self._calls.put(("the end of the run", lambda: self.tracker.close(state)))
        self._calls.put(None)

    def join(self, deadline: float) -> None:
        """Wait until everything is written, or until the deadline by time.monotonic."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def leave(self) -> None:
        """Abandon the tracker if it has not finished."""
        if self._thread.is_alive():
            try:
                self._fail("it does not finish, and is abandoned so that the run can end")
            finally:
                self.tracker.abandon()

    def _work(self) -> None:
        try:
            where = self.tracker.open()
        except Exception as error:
            self._fail(f"it does not open, and the run goes on without it ({_reason(error)})")
            self.tracker.abandon()
            return
        if where:
            self._say(f"{self._name}: {redacted(where)}")
        while named_call := self._calls.get():
            what, call = named_call
            try:
                call()
            except Exception as error:
                self._fail(f"{what} is not written, and the run goes on ({_reason(error)})")

    def _fail(self, problem: str) -> None:
        """Report the first failure only; later writes are still tried."""
        if not self._has_failed:
            self._has_failed = True
            self._say(f"{self._name}: {problem}; metrics.jsonl has everything")


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json_line(value)
    if isinstance(value, str):
        return printable(value)
    return value


def _reason(error: BaseException) -> str:
    """The type and the first line of an error as one line, without secrets."""
    line = str(error).strip().partition("\n")[0]
    return one_line(redacted(f"{type(error).__name__}: {line}".removesuffix(": ")))
