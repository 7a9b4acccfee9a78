"""megarl's command with its phases and process ids written to a file, for chaos.py, which hits processes in a phase.

    MEGARL_CHAOS=FOLDER python scripts/chaos_driver.py train RECIPE ...

The state is FOLDER/state.json. A worker whose name is in FOLDER/raise raises in its next call. FOLDER/sessions has the
folders of the sessions that were begun, a line each.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.cluster import actor
from megarl.cluster.actor import Worker
from megarl.cluster.pulses import Pulses
from megarl.cluster.session_folder import SessionFolder
from megarl.tracking.run_log import Record

_PERIOD_S = 1.0


class State:
    """What chaos.py reads: the step, the phase that is under way ("" between phases), and the workers' process ids."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"
        self._raise = folder / "raise"
        self._content: dict[str, Any] = {"step": -1, "phase": "", "phases": 0, "pids": {}}
        self._write()

    def enter(self, step: int, phase: str) -> None:
        self._content |= {"step": step, "phase": phase}
        if phase:
            self._content["phases"] += 1
        self._write()

    def note_pids(self, pids: dict[str, int]) -> None:
        if pids.items() - self._content["pids"].items():
            self._content["pids"] |= pids
            self._write()

    def is_to_raise(self, worker: str) -> bool:
        """Whether a call of this worker is to raise, once."""
        if self._raise.exists() and self._raise.read_text() == worker:
            self._raise.unlink()
            return True
        return False

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._content))
        part.rename(self._file)


def observe_phases(state: State) -> None:
    original = Record.phase

    @contextmanager
    def phase(self: Record, name: str) -> Iterator[None]:
        state.enter(self.step, name)
        try:
            with original(self, name):
                yield
        finally:
            state.enter(self.step, "")

    Record.phase = phase


def observe_pids(state: State) -> None:
    """Heartbeats bring the process ids: they are asked for often."""
    original = Pulses.look
    original_init = Pulses.__init__

    def init(self: Pulses, bound_s: float, period_s: float = 10.0) -> None:
        original_init(self, bound_s, min(period_s, _PERIOD_S))

    def look(self: Pulses, workers: Any) -> None:
        original(self, workers)
        state.note_pids({worker.name: pid for worker, pid in self.pids.items()})

    Pulses.__init__ = init
    Pulses.look = look


def let_calls_raise(state: State) -> None:
    """A method that a worker does not have raises in it, as a fault of the code does."""
    original = Worker.call

    def call(self: Worker, method: str, *args: Any) -> actor.Ref:
        if state.is_to_raise(self.name):
            method = "a_fault_of_the_code"
        return original(self, method, *args)

    Worker.call = call


def note_session_folders(file: Path) -> None:
    original_init = SessionFolder.__init__

    def init(self: SessionFolder, prefix: str, parent: str) -> None:
        original_init(self, prefix, parent)
        with file.open("a") as sessions:
            sessions.write(f"{self.path}\n")

    SessionFolder.__init__ = init


if __name__ == "__main__":
    folder = Path(os.environ["MEGARL_CHAOS"])
    note_session_folders(folder / "sessions")
    written = State(folder)
    observe_phases(written)
    observe_pids(written)
    let_calls_raise(written)
    runpy.run_module("megarl.cli", run_name="__main__")
