"""Signals during clean-up, and descendants that lost their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.cluster import processes
from megarl.cluster.processes import interrupts_ignored, remove_counters

_ORPHAN = """
import subprocess, psutil
kept = subprocess.Popen(["bash", "-c", "sleep 601 & wait"])
from megarl.cluster.processes import adopt_orphans, kill_descendants
adopt_orphans()
parent = subprocess.run(["bash", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
orphan = psutil.Process(int(parent.stdout))
assert orphan.ppid() == psutil.Process().pid
kill_descendants(spare={kept.pid})
print(orphan.is_running(), kept.poll())
kill_descendants(spare=set())
print(psutil.pid_exists(kept.pid))
"""


def test_an_interrupt_during_clean_up_is_ignored_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ignored():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_descendant_whose_parent_is_gone_is_killed_and_reaped():
    done = subprocess.run(
        [sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False", "None", "False"], done.stderr
    sleepers = (["sleep", "600"], ["sleep", "601"])
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] in sleepers
    ]


def test_what_torch_counts_lent_memory_by_is_removed_with_its_process(tmp_path: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "602"]) as other:
        names = {
            pid: tmp_path / f"torch_{pid}_1234_0" for pid in (ended.pid, other.pid, os.getpid())
        }
        older = tmp_path / f"torch_{ended.pid}_99_0"
        for file in (*names.values(), older):
            file.write_bytes(bytes(8))
        os.utime(older, (1.0, 1.0))
        remove_counters({ended.pid}, tmp_path)
        assert [file.exists() for file in names.values()] == [False, True, True]
        assert older.exists(), "it is of a process in another container"
        other.send_signal(signal.SIGKILL)
        remove_counters({other.pid}, tmp_path)
    assert [file.exists() for file in names.values()] == [False, False, True]


_NOTED = """
import os, signal
from megarl.cluster import processes
processes.raise_on_sigterm()
processes.note_sigusr1()
os.kill(os.getpid(), signal.SIGUSR1)
# it is passed on by a supervisor that has got the same
os.kill(os.getpid(), signal.SIGUSR1)
print(processes.is_end_wanted(), processes.was_terminated())
processes._SAME_SIGNAL_S = 0.0
try:
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pause()
except KeyboardInterrupt:
    print(processes.was_terminated())
"""


def test_the_first_sigusr1_is_noted_and_the_second_ends_as_sigterm_does():
    done = subprocess.run(
        [sys.executable, "-c", _NOTED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


def test_a_raylet_is_ended_once_a_signal_has_stopped_it_for_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look after a long time, in which this process was suspended, says little."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with subprocess.Popen(["sleep", "603"]) as raylet:
        watch = processes.RayletWatch(raylet.pid)
        clock.now_s += 100.0
        watch.kill_if_stopped()
        raylet.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, raylet.pid, os.WSTOPPED | os.WNOWAIT)
        clock.now_s += 100.0
        watch.kill_if_stopped()
        assert processes.is_stopped(raylet.pid)
        for _ in range(4):
            clock.now_s += 1.0
            watch.kill_if_stopped()
        assert raylet.wait() == -signal.SIGKILL


def test_a_process_that_waits_for_input_could_not_run_and_one_that_computes_could():
    program = "print(flush=True); input(); print(flush=True)\nwhile True: pass"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    try:
        child.stdout.readline()
        while processes.could_run(child.pid):
            pass
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert processes.could_run(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not processes.could_run(child.pid), "it has ended"
