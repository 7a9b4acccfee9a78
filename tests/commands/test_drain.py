"""What `megarl drain` says and returns, of runs that live, end and die."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.commands.drain import drain
from megarl.tracking import draining
from megarl.tracking.run_log import RunLog
from megarl.types import Drained, UserError
from tests.tracking.test_draining import run_log, wait_until

ROOT = Path(__file__).parents[2]
RUN = """
import sys, time
from megarl.tracking.run_log import RunLog
from tests.tracking.test_run_log import UNTRACKED, quiet, recipe_in
log = RunLog(recipe_in(sys.argv[1], UNTRACKED), quiet(), can_drain=True)
print("lives", flush=True)
sys.stdin.read()
"""


class Command:
    """The command in a thread, as a user runs it beside the run."""

    def __init__(self, folder: Path, *, wait: bool = True) -> None:
        self.lines: list[str] = []
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, wait))
        self._thread.start()

    def _run(self, folder: Path, wait: bool) -> None:
        self.code = drain(folder, self.lines.append, wait=wait)

    def ended(self) -> tuple[int | None, str]:
        """The exit code, and the last line."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.code, self.lines[-1]


def a_step(log: RunLog, step: int) -> None:
    with log.step(step):
        pass


def test_a_run_is_waited_for_until_it_has_ended(tmp_path: Path) -> None:
    with pytest.raises(Drained), run_log(tmp_path) as log:
        a_step(log, 1)
        command = Command(log.folder)
        assert log.drain is not None
        wait_until(lambda: log.drain is not None and log.drain.is_wanted)
        wait_until(lambda: len(command.lines) == 2)
        a_step(log, 2)
        raise Drained(2)
    done = "the run has ended, and the checkpoint of step 2 is complete: the same command with --resume goes on"
    assert command.ended() == (0, f"{log.folder}: {done}")
    asked, heard, _ = command.lines
    assert asked.endswith("is asked to end after its step")
    assert heard.endswith(
        "the run ends after the step that is running; the last that is recorded is 1"
    )


def test_without_wait_it_returns_when_the_run_has_heard(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        command = Command(log.folder, wait=False)
        code, line = command.ended()
        assert code == 0 and line.endswith("step that is running; none is recorded yet")
        assert log.drain is not None and log.drain.is_wanted


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (
            lambda log: log.drain.decline(),
            1,
            "the disk did not take the checkpoint, and the run goes on",
        ),
        (lambda log: log.drain.close(draining.FAILED), 1, "the run has failed, as its log says"),
        (lambda log: log.drain.close(draining.FINISHED), 0, "the run is done"),
        (lambda log: draining.DrainRequests(log.folder), 1, "has ended, and did not say how"),
    ],
    ids=["unsaved", "failed", "finished", "another run began"],
)
def test_every_end_has_its_words(
    tmp_path: Path, end: Callable[[RunLog], object], code: int, words: str
) -> None:
    with run_log(tmp_path) as log:
        command = Command(log.folder)
        wait_until(lambda: len(command.lines) == 2)
        other = end(log)
        said = command.ended()
        if isinstance(other, draining.DrainRequests):
            other.close(draining.FINISHED)
    assert said[0] == code and words in said[1]


def test_a_run_that_dies_is_told_and_the_request_is_taken_back(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path], cwd=ROOT, stdin=-1, stdout=-1, text=True
    )
    with process:
        assert process.stdout and process.stdout.readline() == "lives\n"
        folder = tmp_path / "try"
        command = Command(folder)
        wait_until(lambda: len(command.lines) == 2)
        process.kill()
        code, line = command.ended()
    assert code == 1 and "has died: the same command with --resume goes on from its newest" in line
    assert not list(folder.glob(".drain*"))
    with pytest.raises(UserError, match="no run is alive there"):
        drain(folder, print, wait=True)


def test_a_folder_without_a_live_run_is_refused_in_a_line(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        pass
    for folder in (log.folder, tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=f"{folder}: no run is alive there, or it is one of a"):
            drain(folder, print, wait=True)
