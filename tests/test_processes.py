"""Signals during clean-up, and descendants that lost their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from megarl.processes import interrupts_ignored

_ORPHAN = """
import subprocess, psutil
kept = subprocess.Popen(["bash", "-c", "sleep 601 & wait"])
from megarl.processes import adopt_orphans, kill_descendants
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
    done = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "None", "False"], done.stderr
    sleepers = (["sleep", "600"], ["sleep", "601"])
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] in sleepers]


_NOTED = """
import os, signal
from megarl import processes
processes.raise_on_sigterm()
processes.note_sigusr1()
os.kill(os.getpid(), signal.SIGUSR1)
print(processes.is_end_wanted(), processes.was_terminated())
try:
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pause()
except KeyboardInterrupt:
    print(processes.was_terminated())
"""


def test_the_first_sigusr1_is_noted_and_the_second_ends_as_sigterm_does():
    done = subprocess.run([sys.executable, "-c", _NOTED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr
