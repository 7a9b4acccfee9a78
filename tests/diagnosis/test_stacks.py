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


def test_what_users_functions_run_in_comes_last(monkeypatch: pytest.MonkeyPatch):
    """Its own process and others of an engine come before, however many there are."""
    code = "import subprocess, sys; [subprocess.Popen(c) for c in CHILDREN]; print('ready', flush=True); input()"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [[*sleep, "megarl.isolation.entry", "reward_process"]] * 2 + [sleep]
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("CHILDREN", repr(children))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        read: list[int] = []
        monkeypatch.setattr(stacks, "_AT_ONCE", 1)
        monkeypatch.setattr(stacks, "stacks_of", lambda pid: (read.append(pid) or (), ""))
        found = processes_of({process.pid: "engine 0"})
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    users = [each.pid for each in found if each.title == "entry"]
    (other,) = (each.pid for each in found if not each.is_own and each.pid not in users)
    assert len(users) == 2 and read == [process.pid, other, *users]


def test_a_fork_writes_its_stacks_into_memory_of_its_own():
    code = """
import os, time
from megarl.diagnosis.stacks import answer_with_stacks
answer_with_stacks()
child = os.fork()
def nap_of_the_parent():
    print(child, flush=True)
    time.sleep(600)
def nap_of_the_fork():
    print("ready", flush=True)
    time.sleep(600)
nap_of_the_parent() if child else nap_of_the_fork()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout
        told = {process.stdout.readline().strip() for _ in range(2)}
        (child,) = map(int, told - {"ready"})
        for _ in range(2):
            assert functions([*stacks._answered(child)]) >= {"nap_of_the_fork"}
            own = functions([*stacks._answered(process.pid)])
            assert "nap_of_the_parent" in own and "nap_of_the_fork" not in own
        memories = [stacks._memory_of(pid) for pid in (process.pid, child)]
        assert len({memory.stat().st_ino for memory in memories if memory}) == 2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_has_ended_is_no_evidence():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found: list[ProcessEvidence] = processes_of({ended.pid: "gone"})
    assert found == []
