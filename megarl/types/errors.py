"""What ends a run, or a command, otherwise than by its work being done."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.printable import one_line


class UserError(Exception):
    """Something the user can mend; the CLI prints it as one line and exits with 2.

    `where` is a dotted recipe key, a file (with line) or an override; `hint` says what to write instead.
    """

    def __init__(self, where: str, problem: str, hint: str) -> None:
        # all arguments, so that it survives pickling between processes
        super().__init__(where, problem, hint)
        self.where = where
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.problem}; {self.hint}")


class DiskFault(UserError):
    """A file cannot be written: its disk is full, read-only or broken. A run may go on without the file for a while."""


class FolderGone(UserError):
    """The folder that a run writes was removed or replaced meanwhile: the run has failed, and the CLI exits with 1."""


class UserErrors(Exception):
    """Every fault that was found, so that one run of the command shows them all; faults of the same text once."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple({str(error): error for error in errors}.values())
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class ProcessLost(Exception):
    """What raised it can serve no further call: another process must take its place."""


class Silence(Exception):
    """A process of the run is alive and has made no progress for too long; or a disk has not answered."""


class EndedEarly(Exception):
    """A run that was asked to end soon has; the CLI exits with 75. `step`: the last one trained and saved, if any."""

    _how = "ended early by SIGUSR1"

    def __init__(self, step: int | None) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        if self.step is None:
            saved = "nothing new to save"
        else:
            saved = f"the checkpoint of step {self.step} is complete"
        return f"{self._how}, {saved}: the same command with --resume goes on"


class Drained(EndedEarly):
    """The same by `megarl drain`, after the step that was running; the CLI exits with 79: nothing starts it again."""

    _how = "ended by megarl drain"
