"""What the parent of a command does for it: signals, the exit code, and the last word of one that was ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.tracking.loss_table import read_losses
from tests.leftovers import gone

ROOT = Path(__file__).parents[2]
# It prints its process id, that of a child and its session's folder, and ends as it is asked to.
_COMMAND = """
import os, signal, subprocess, sys, time
from megarl.cluster.processes import (
    is_end_wanted, note_sigusr1, note_sigusr2, raise_on_sigterm, take_report_request
)
from megarl.cluster.session_folder import SESSION_PARENT, SESSION_PREFIX, SessionFolder
from pathlib import Path
from megarl.cluster.supervisor import note_session, supervised

def run():
    folder = SessionFolder(SESSION_PREFIX, SESSION_PARENT)
    note_session("", losses=Path(sys.argv[2]))
    child = subprocess.Popen(["sleep", "603"])
    try:
        print(os.getpid(), child.pid, folder.path, flush=True)
        how = sys.argv[1]
        if how.startswith("_Exit"):
            os._exit(3)
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        while not is_end_wanted():
            time.sleep(0.01)
            if take_report_request():
                return 79
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        child.kill()
        folder.remove()
    return 75 if is_end_wanted() else 130

raise_on_sigterm()
note_sigusr1()
note_sigusr2()
sys.exit(supervised(run, print))
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        command = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, how, str(tmp_path / "losses.jsonl")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(command)
        return command

    yield start
    for command in started:
        command.kill()
        command.communicate()


def _told(command: subprocess.Popen[str]) -> tuple[list[int], Path]:
    """The process ids below the supervisor, and the session's folder."""
    assert command.stdout
    *pids, folder = command.stdout.readline().split()
    return [int(pid) for pid in pids], Path(folder)


def _last_word(command: subprocess.Popen[str]) -> str:
    """What it says after that, once it has ended; `communicate` would not see what was read with the first line."""
    assert command.stdout
    command.wait(timeout=60)
    return command.stdout.read()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("_Exit", r"a library has ended the command's own process \(pid (\d+)\) with exit code 3"),
        ("SIGKILL", r"the command's own process \(pid (\d+)\) was killed by SIGKILL"),
    ],
)
def test_an_end_from_outside_python_is_told_and_leaves_nothing(
    how: str, cause: str, begin: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    command = begin(how)
    pids, folder = _told(command)
    last_word = _last_word(command)
    told = re.fullmatch(
        rf"megarl: {cause}; start the command again, a run with --resume\n", last_word
    )
    assert told and int(told[1]) == pids[0]
    assert command.returncode == 1
    assert gone(pids, within_s=0)
    assert not folder.exists()
    (loss,) = read_losses(tmp_path / "losses.jsonl")
    assert (loss.what, loss.back_after_s) == ("the run", None)
    assert re.match(cause, loss.cause)


def _terminate_all(pid: int) -> None:
    """As a scheduler does it."""
    supervisor = psutil.Process(pid)
    for process in (supervisor, *supervisor.children()):
        process.terminate()


@pytest.mark.parametrize(
    ("send", "code", "words"),
    [
        (lambda pid: os.killpg(pid, signal.SIGINT), 130, "interrupted\n"),
        (_terminate_all, 130, "interrupted\n"),
        (lambda pid: os.kill(pid, signal.SIGUSR1), 75, ""),
        (lambda pid: os.kill(pid, signal.SIGUSR2), 79, ""),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGUSR1", "SIGUSR2"],
)
def test_a_signal_reaches_the_command_once_and_its_exit_code_is_the_supervisors(
    send: Callable[[int], None],
    code: int,
    words: str,
    begin: Callable[[str], subprocess.Popen[str]],
) -> None:
    command = begin("")
    pids, folder = _told(command)
    send(command.pid)
    assert _last_word(command) == words
    assert command.returncode == code
    assert gone(pids) and not folder.exists()


def test_a_command_ends_with_its_supervisor(
    begin: Callable[[str], subprocess.Popen[str]],
) -> None:
    """What is left of it then is the next session's to remove."""
    command = begin("")
    (pid, child), folder = _told(command)
    command.kill()
    assert gone([pid])
    os.kill(child, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
