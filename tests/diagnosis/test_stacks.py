"""Stacks of real processes: read by py-spy, also where a signal has stopped them, or written by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.diagnosis import stacks
from megarl.diagnosis.evidence import ProcessEvidence, ThreadStack
from megarl.diagnosis.stacks import packed_processes_of, processes_of, stacks_of, unpacked

ROOT = Path(__file__).parents[2]
SECRET = "hf_0123456789abcdef"
PROGRAM = """
import subprocess, sys, time
from megarl.diagnosis.stacks import answer_with_stacks
answer_with_stacks()
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"])
def nap_under_a_name(password=sys.argv[1]):
    print("ready", flush=True)
    time.sleep(600)
nap_under_a_name()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps in a function, with a child that sleeps, too."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_TOKEN": SECRET}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, SECRET], stdout=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    assert {process.stdout.readline().strip() for _ in range(2)} == {"1", "ready"}
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def functions(threads: list[ThreadStack]) -> set[str]:
    return {frame.function for thread in threads for frame in thread.frames}


def test_a_process_is_seen_with_what_it_has_started(sleeper: subprocess.Popen[str]):
    packed = packed_processes_of({sleeper.pid: "training rank 0"})
    own, child = unpacked(packed)
    assert own.is_own and own.worker == child.worker == "training rank 0" and not child.is_own
    assert "nap_under_a_name" in functions([*own.threads]), own.problem
    assert own.is_still and own.state == "S" and child.threads
    # it is an argument, a local variable and in the environment
    assert SECRET.encode() not in zlib.decompress(packed)


def test_a_stopped_process_has_stacks(sleeper: subprocess.Popen[str]):
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    own = processes_of({sleeper.pid: "engine 0"})[0]
    assert own.is_stopped and "nap_under_a_name" in functions([*own.threads]), own.problem


def test_a_process_writes_its_stacks_where_py_spy_may_not_read(
    sleeper: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its child has no handler for the signal, which is not sent to it: it would end it."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied: Try running again' >&2\nexit 1\n")
    spy.chmod(0o700)
    monkeypatch.setattr(stacks, "_spy", lambda: str(spy))
    own, child = processes_of({sleeper.pid: "training rank 0"})
    assert "nap_under_a_name" in functions([*own.threads]) and not own.problem
    assert not child.threads and child.problem.startswith(
        "the kernel does not let py-spy read it (ptrace)"
    )
    again, _ = stacks_of(sleeper.pid)
    assert again == own.threads, "of this moment, without those written before"
    assert sleeper.poll() is None


def test_a_process_that_has_ended_is_no_evidence():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found: list[ProcessEvidence] = processes_of({ended.pid: "gone"})
    assert found == []
