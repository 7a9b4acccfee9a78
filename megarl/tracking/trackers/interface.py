"""What a tracker is told of a run, and what it has to do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import megarl
from megarl.types import Metrics

State = Literal["finished", "failed", "stopped"]  # stopped: by a signal, so that --resume goes on
Row = Mapping[str, Any]
_GIT_S = 10.0


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers show it.

    recipe: with every default, without secrets. commit: of megarl's code, "" where that is in no repository.
    first_step: 0 for a run that begins, else the step after the checkpoint that it goes on from.
    """

    name: str
    folder: Path
    project: str | None
    recipe: Mapping[str, Any]
    commit: str
    first_step: int

    def known_id(self, tracker: str) -> str | None:
        """The id under which the tracker knows this run since its first start."""
        file = self._id_file(tracker)
        return file.read_text(encoding="utf-8").strip() if file.exists() else None

    def keep_id(self, tracker: str, text: str) -> None:
        """Write the id into the run's folder, for --resume. Raises OSError."""
        self._id_file(tracker).write_text(f"{text}\n", encoding="utf-8")

    def _id_file(self, tracker: str) -> Path:
        return self.folder / f"{tracker}.id"


class Tracker(Protocol):
    """One service or file that shows runs, made with a TrackedRun.

    It is made in the run's own thread, where it imports its client and starts what is local. `open`, then the others,
    are called from one other thread, and may wait for a network and raise what the client raises.
    """

    def open(self) -> str:
        """Begin the run, or go on with it; in words where it is seen, or ""."""
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Add a step's numbers; steps of the warm start are below 0."""
        ...

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Add a step's samples, at least one; all rows have the same keys."""
        ...

    def close(self, state: State) -> None:
        """Say how the run ended, and send what is left."""
        ...

    def abandon(self) -> None:
        """Let go of what would keep this process from ending: after `open` failed, or while another call does not end.

        Raises nothing, and waits for no network.
        """
        ...


def code_commit() -> str:
    """The commit of megarl's code, with `-dirty` where files differ from it; "" without a repository or git."""
    folder = Path(megarl.__file__).parents[1]
    if not (folder / ".git").exists():  # a repository further up, around an installed package, is another one's
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
