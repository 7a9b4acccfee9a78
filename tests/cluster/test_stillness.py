"""A process makes progress as long as it, or a child of it, uses a processor or moves bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from megarl.cluster.stillness import GroupStillness, Stillness, Work, threads, work_of

_LOOK_S = 0.25
_PROGRAMS = {
    "waits": "import threading; print(flush=True); threading.Event().wait()",
    "computes": "print(flush=True)\nwhile True: pass",
    "moves bytes": """
import time
print(flush=True)
with open("/dev/null", "w") as file:
    while True:
        file.write("." * 8192)
        time.sleep(0.05)
""",
    "has a child that computes": """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(flush=True)
try:
    sys.stdin.read()
finally:
    child.kill()
    child.wait()
""",
}


@pytest.mark.parametrize("what", _PROGRAMS)
def test_a_process_that_waits_stands_still(what: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAMS[what]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        stillness = Stillness()
        works = [_next_work(process.pid, waits=what == "waits") for _ in range(8)]
        longest_s = max(stillness.look(_LOOK_S * n, work) for n, work in enumerate(works))
        process.stdin.close()
        if "child" not in what:
            process.kill()
    assert (longest_s > 1.0) == (what == "waits")


def _next_work(pid: int, *, waits: bool) -> Work:
    """Of a process that waits after a while; of another once it has done a little, however busy the machine is."""
    before = work_of(pid)
    if waits:
        time.sleep(_LOOK_S)  # what is measured is what the process does meanwhile
        return work_of(pid)
    while True:
        work = work_of(pid)
        if work.cpu_s - before.cpu_s >= 0.05 or work.num_bytes - before.num_bytes >= 2**12:
            return work


def test_the_work_of_spared_threads_does_not_count() -> None:
    before = work_of(os.getpid())
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert work_of(os.getpid()).cpu_s > before.cpu_s
    assert work_of(os.getpid(), threads()).cpu_s < work_of(os.getpid()).cpu_s


def test_a_little_work_is_none() -> None:
    stillness = Stillness()
    work = [Work(5.0 + 0.01 * second, 1000 + 8 * second) for second in range(10)]
    assert [stillness.look(float(second), work[second]) for second in range(4)] == [0, 1, 2, 3]
    assert stillness.look(4.0, Work(5.2, 1100)) == 0.0, "a fifth of a second of a processor"
    assert stillness.look(5.0, Work(5.2, 1100)) == 1.0
    assert stillness.look(6.0, Work(5.2, 9000)) == 0.0, "bytes"
    stillness.end()
    assert stillness.look(60.0, Work(5.2, 9000)) == 0.0, "it had nothing to do"


def test_work_of_a_moment_now_and_then_is_none() -> None:
    """Of looks a second apart one in eight sees a twentieth of a second, as Ray's own threads take."""
    stillness = Stillness()
    looks = [stillness.look(float(second), Work(0.05 * (second // 8), 0)) for second in range(41)]
    assert looks[-1] == 40.0


def test_a_process_that_was_stopped_itself_does_not_count_all_of_that() -> None:
    stillness = Stillness()
    stillness.look(0.0, Work(0.0, 0))
    # less than any limit
    assert stillness.look(3600.0, Work(0.0, 0)) <= 5.0


class Looks:
    """At a group, a second apart."""

    def __init__(self, num_moving: int) -> None:
        """num_moving: looks at a group that moves."""
        self.group = GroupStillness(600.0)
        self._now_s = 0.0
        for _ in range(num_moving):
            self.is_overdue(0.0)

    def forget(self) -> None:
        self.group.forget(self._now_s)

    def wait(self, seconds: float) -> None:
        self._now_s += seconds

    def is_overdue(self, *still_s: float) -> bool:
        self._now_s += 1.0
        return self.group.is_overdue(self._now_s, still_s)


def test_one_that_moves_is_the_progress_of_all() -> None:
    looks = Looks(20)
    assert not looks.is_overdue(0.0, 500.0)
    assert looks.is_overdue(8.0, 500.0)


def test_little_is_known_at_first() -> None:
    looks = Looks(0)
    assert not looks.is_overdue(599.0)
    assert looks.is_overdue(600.0)


def test_a_standstill_that_has_ended_raises_the_limit() -> None:
    looks = Looks(20)
    looks.is_overdue(3.0)
    looks.is_overdue(0.0)
    assert not looks.is_overdue(14.0)
    assert looks.is_overdue(15.0)


def test_a_standstill_that_a_loss_has_ended_does_not() -> None:
    looks = Looks(20)
    assert looks.is_overdue(8.0)
    looks.forget()
    assert not looks.is_overdue(500.0), "it was still before, because of the one that is lost"
    looks.is_overdue(0.0)
    looks.wait(9.0)
    assert looks.is_overdue(10.0)
