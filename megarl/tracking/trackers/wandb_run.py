"""The Weights & Biases tracker. Its client reads WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE, WANDB_DIR and others."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import psutil

from megarl.tracking.trackers.interface import SampleRow, State, TrackedRun
from megarl.types import Metrics

_FINISH_S = 45.0  # the client's own timeout, shorter than END_S
_TEAR_DOWN_S = 3.0
_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 143}


class WandbRun:
    """One run of W&B, whose id is in the run's folder.

    Steps are the metric `step`, not W&B's own counter, which starts at 0 and drops rows below its maximum. A step that
    is repeated after --resume has two rows.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Start the client's process before the run's own processes, because the run's end kills only later ones."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self._tracked = run
        before = _children()
        self._settings = wandb.Settings(
            console="off",  # do not send the run's log
            silent=True,  # also asks no question on the terminal
            force=True,  # raise an error without a key, instead of sending nothing
            disable_git=True,  # otherwise it looks into the working directory
            git_commit=run.commit or None,
            finish_timeout=_FINISH_S,
            finish_timeout_raises=True,
            reinit="create_new",
            stop_fn=lambda: None,  # the service cannot stop the run
        )
        wandb.setup(self._settings)
        self._service = [process for process in _children() if process not in before]

    def open(self) -> str:
        run = self._tracked
        self._run = self._wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT", "megarl"),
            name=run.name,
            id=run.id_of("wandb", lambda: secrets.token_hex(8)),
            resume="allow" if run.first_step else None,
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config={**run.recipe, "commit": run.commit},
            settings=self._settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            return f"this run is {self._run.url}"
        return ""

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"step": step, "samples": table})

    def close(self, state: State) -> None:
        try:
            self._run.finish(exit_code=_EXIT_CODES[state])
        finally:
            self._tear_down()

    def abandon(self) -> None:
        """Kill the client's process, for which this process's exit would wait; `wandb sync` can send its files."""
        for process in self._service:
            with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                process.kill()
                process.wait(_TEAR_DOWN_S)
        last = Thread(target=self._tear_down, daemon=True)
        last.start()
        last.join(_TEAR_DOWN_S)

    def _tear_down(self) -> None:
        """Do the client's exit handling now, which would print a traceback if its process is dead."""
        with suppress(Exception, SystemExit):
            self._wandb.teardown()


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.is_running()]
