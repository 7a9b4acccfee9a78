"""The interface of experiment trackers: the run as they get it, and the methods that they implement."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import megarl
from megarl.types import Metrics

State = Literal["finished", "failed", "stopped"]  # stopped: by a signal, so that --resume goes on
SampleRow = Mapping[str, Any]
_GIT_S = 10.0


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers get it.

    recipe: with every default, without secrets. commit: of megarl's code, "" if it is not in a repository.
    first_step: 0 for a new run, else the step after the checkpoint from which it resumes.
    """

    name: str
    folder: Path
    project: str | None
    recipe: Mapping[str, Any]
    commit: str
    first_step: int

    def id_of(self, tracker: str, new: Callable[[], str]) -> str:
        """The tracker's id of this run: at the first start a new one, kept in the run's folder. Raises OSError."""
        file = self.folder / f"{tracker}.id"
        if not file.exists():
            file.write_text(f"{new()}\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


class Tracker(Protocol):
    """A service or file that shows runs, constructed with a TrackedRun.

    The constructor runs in the run's own thread, imports the client and starts local processes. `open`, then the other
    methods, are called from one other thread, and may wait for a network and raise the client's exceptions.
    """

    def open(self) -> str:
        """Begin or resume the run; returns a text that says where it can be seen, or ""."""
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Add a step's numbers; steps of the warm start are negative."""
        ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Add a step's samples, at least one; all rows have the same keys."""
        ...

    def close(self, state: State) -> None:
        """Record the run's final state, and send all remaining writes."""
        ...

    def abandon(self) -> None:
        """Release everything that would keep this process from ending, after `open` failed or while a call hangs.

        Raises nothing, and waits for no network. Most trackers have nothing of the kind.
        """


def code_commit() -> str:
    """The commit of megarl's code, with `-dirty` where files differ from it; "" without a repository or git."""
    folder = Path(megarl.__file__).parents[1]
    # a repository further up, around an installed package, is not megarl's
    if not (folder / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.strip()
