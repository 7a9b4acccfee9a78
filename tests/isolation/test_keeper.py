"""Keepers of real processes that start what outlives an ordinary parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_PREAMBLE = """
import os, signal, sys, time
from megarl.isolation.keeper import fork_worker

folder = sys.argv[1]

def note():
    path = f"{folder}/{os.getpid()}"
    open(f"{path}.partial", "w").close()
    os.replace(f"{path}.partial", path)

def daemon(work):
    "Fork twice, with a session of its own: the usual way to leave one's parent."
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    note()
    work()
    os._exit(0)

def stay():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(100)

def move():
    "Be another process every few milliseconds."
    while True:
        time.sleep(0.003)
        if os.fork():
            os._exit(0)

def ended():
    pass

def say(*words):
    print(*words, flush=True)

parent = fork_worker()
"""


class Kept:
    """A worker with its keeper; `script` is what the worker does."""

    def __init__(self, folder: Path, script: str, *, is_orphaned: bool = False) -> None:
        """is_orphaned: another process is the keeper's parent, and `process`."""
        command = [sys.executable, "-c", _PREAMBLE + script, str(folder)]
        if is_orphaned:
            starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
            command = [sys.executable, "-c", starter, *command]
        self._mark = str(folder)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next line of the worker's output."""
        assert self.process.stdout
        return self.process.stdout.readline()

    def alive(self) -> list[psutil.Process]:
        """Every process of the script, wherever it is: forks keep their command line."""
        return [
            process for process in psutil.process_iter() if self._mark in _command_line(process)
        ]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Kept]]:
    """Where tests put what they start, so that nothing remains where they fail."""
    kept: list[Kept] = []
    yield kept
    for script in kept:
        script.process.kill()
        script.process.communicate()
        for process in script.alive():
            process.kill()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(3)", 3),
        ("sys.exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_the_keeper_ends_as_its_worker_does_and_leaves_no_daemon(
    tmp_path: Path, started: list[Kept], end: str, code: int
) -> None:
    kept = Kept(tmp_path, f"daemon(stay); daemon(move); say('begun'); {end}")
    started.append(kept)
    assert kept.line() == "begun\n"
    assert kept.process.wait(timeout=60) == code
    assert kept.alive() == []


def test_all_end_with_sigterm_to_the_keeper(tmp_path: Path, started: list[Kept]) -> None:
    kept = Kept(tmp_path, "daemon(stay); daemon(move); os.fork(); say('begun'); stay()")
    started.append(kept)
    kept.line()
    kept.process.terminate()
    assert kept.process.wait(timeout=60) == -signal.SIGTERM
    assert kept.alive() == []


def test_all_end_with_a_parent_that_is_killed(tmp_path: Path, started: list[Kept]) -> None:
    kept = Kept(tmp_path, "daemon(stay); daemon(move); say('begun'); stay()", is_orphaned=True)
    started.append(kept)
    kept.line()
    kept.process.kill()
    kept.process.wait()
    assert kept.line() == "", "the last process that has the pipe has ended"
    psutil.wait_procs(kept.alive(), timeout=60)
    assert kept.alive() == []


def test_a_group_that_the_worker_kills_is_not_its_keepers(
    tmp_path: Path, started: list[Kept]
) -> None:
    kept = Kept(tmp_path, "daemon(stay); say('begun'); os.killpg(0, signal.SIGKILL)")
    started.append(kept)
    assert kept.process.wait(timeout=60) == -signal.SIGKILL
    assert kept.alive() == []


def test_daemons_that_end_leave_no_zombies_while_the_worker_goes_on(
    tmp_path: Path, started: list[Kept]
) -> None:
    script = (
        "[daemon(ended) for _ in range(20)]\nwhile len(os.listdir(folder)) < 20: time.sleep(0.01)\n"
    )
    kept = Kept(tmp_path, f"{script}say(os.getpid()); stay()")
    started.append(kept)
    worker = psutil.Process(int(kept.line()))
    noted = {int(path.stem) for path in tmp_path.iterdir()}
    assert len(noted) == 20
    left = [psutil.Process(pid) for pid in noted if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, timeout=60)[1] == []
    assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE


def test_the_worker_knows_who_has_started_its_keeper(tmp_path: Path, started: list[Kept]) -> None:
    kept = Kept(
        tmp_path,
        "say(parent, os.getsid(0) == os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    )
    started.append(kept)
    assert kept.line() == f"{os.getpid()} True set()\n"
