"""A program keeps to its limits, leaves nothing, and its end is told as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.isolation import sandbox
from megarl.isolation.interpreter import SandboxInterpreter
from megarl.isolation.sandbox import SandboxLimits
from megarl.types import UserError

pytestmark = pytest.mark.slow

PATIENT = SandboxLimits(wall_s=60.0, cpu_s=30)
run = partial(sandbox.run, where="reward.function")


# --- limits ------------------------------------------------------------------------------------------------------


def test_the_disk_cannot_be_filled(isolation: None) -> None:
    program = """
written = 0
try:
    for number in range(64):
        with open(f"file{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
print(written >> 20)
"""
    limits = SandboxLimits(wall_s=60.0, tmp_mb=8)
    assert int(run(program, limits=limits).stdout) <= 8
    assert int(run(program, limits=limits, unsafe=True).stdout) == 64


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_file_has_a_largest_size(isolation: None, unsafe: bool) -> None:
    program = (
        "file = open('file', 'wb', buffering=0)\nfor _ in range(8): file.write(bytes(1 << 20))"
    )
    assert (
        "File too large"
        in run(program, limits=SandboxLimits(wall_s=60.0, file_mb=4), unsafe=unsafe).stderr
    )
    assert run(program, limits=PATIENT, unsafe=unsafe).status == 0


@pytest.mark.parametrize("unsafe", [False, True])
def test_memory_has_a_limit(isolation: None, unsafe: bool) -> None:
    program = "x = bytearray(600 << 20)"
    outcome = run(program, limits=PATIENT, unsafe=unsafe)
    assert outcome.status == 1 and outcome.stderr.splitlines()[-1].startswith("MemoryError")
    assert (
        run(program, limits=SandboxLimits(wall_s=60.0, memory_mb=1024), unsafe=unsafe).status == 0
    )


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_spin_uses_up_its_time_on_the_processor(isolation: None, unsafe: bool) -> None:
    outcome = run("while True: pass", limits=SandboxLimits(wall_s=60.0, cpu_s=1), unsafe=unsafe)
    assert outcome.status == 128 + signal.SIGXCPU and not outcome.timed_out


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_sleep_meets_the_deadline(isolation: None, unsafe: bool) -> None:
    outcome = run(
        "print('begun', flush=True); import time; time.sleep(600)",
        limits=SandboxLimits(1.0),
        unsafe=unsafe,
    )
    assert outcome.timed_out and outcome.status is None


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_program_that_prints_for_ever_is_stopped(isolation: None, unsafe: bool) -> None:
    limits = SandboxLimits(wall_s=60.0, cpu_s=60, stdout_bytes=10_000, stderr_bytes=1_000)
    outcome = run("while True: print('x' * 99)", limits=limits, unsafe=unsafe)
    assert outcome.too_much_output and not outcome.timed_out
    assert outcome.stdout == ("x" * 99 + "\n") * 100
    program = "import sys\nfor _ in range(10**4): sys.stderr.write('x' * 100)\nprint('end')"
    outcome = run(program, limits=limits, unsafe=unsafe)
    assert outcome.stdout == "end\n" and len(outcome.stderr) == 1_000


FORKS = """
import os, signal
made = 0
try:
    while made < most:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made)
"""
THREADS = """
import threading
held, made = threading.Event(), 0
threading.stack_size(32768)
try:
    while made < most:
        threading.Thread(target=held.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made, flush=True)
"""


@pytest.mark.parametrize("program", [FORKS, THREADS], ids=["forks", "threads"])
def test_processes_and_threads_are_counted(isolation: None, program: str) -> None:
    few = run(f"most = 10_000\n{program}", limits=SandboxLimits(wall_s=60.0, processes=16))
    many = run(f"most = 100\n{program}", limits=SandboxLimits(wall_s=60.0, processes=128))
    assert 8 <= int(few.stdout) < 16
    assert int(many.stdout) == 100


# --- what it leaves ----------------------------------------------------------------------------------------------


def named(name: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


LEAVES = """
import os, signal, sys
with open("/proc/self/comm", "w") as file:
    file.write(name)
if os.fork() == 0:
    os.setsid()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    os.closerange(0, 64)
    if os.fork() == 0:
        signal.pause()
    signal.pause()
"""


def test_a_daemon_ends_with_its_program(isolation: None) -> None:
    name = f"d{uuid.uuid4().hex[:12]}"
    program = f"name = {name!r}{LEAVES}"
    assert run(program, limits=PATIENT).status == 0
    assert not named(name)
    run(program, limits=PATIENT, unsafe=True)
    left = named(name)
    assert left
    for process in left:
        process.kill()


def test_a_fork_bomb_is_gone_at_the_deadline(isolation: None) -> None:
    name = f"b{uuid.uuid4().hex[:12]}"
    bomb = f"""
import os
open("/proc/self/comm", "w").write({name!r})
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    assert run(bomb, limits=SandboxLimits(wall_s=1.0)).timed_out
    assert not named(name)


def test_nothing_outlives_a_killed_caller(isolation: None) -> None:
    """As when the pool of reward workers kills one."""
    name = f"k{uuid.uuid4().hex[:12]}"
    program = f"import signal\nopen('/proc/self/comm', 'w').write({name!r})\nsignal.pause()"
    parent = f"from megarl.isolation.sandbox import *\nrun({program!r}, where='', limits=SandboxLimits(wall_s=600.0))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", parent], env=environment) as caller:
        try:
            await_true(lambda: caller.poll() is not None or bool(named(name)))
            assert caller.poll() is None
        finally:
            caller.kill()
    await_true(lambda: not named(name))


def await_true(condition: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- outcomes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("1/0", 1),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_an_end_is_told_as_a_shell_does(
    isolation: None, program: str, status: int, unsafe: bool
) -> None:
    outcome = run(program, limits=PATIENT, unsafe=unsafe)
    assert outcome.status == status
    assert ("ZeroDivisionError" in outcome.stderr) == (program == "1/0")


@pytest.mark.parametrize("unsafe", [False, True])
def test_any_text_goes_in_and_out(isolation: None, unsafe: bool) -> None:
    text = "é\0\u2028 " + "many lines\n" * 50_000
    outcome = run("import sys; sys.stdout.write(sys.stdin.read())", text, PATIENT, unsafe=unsafe)
    assert outcome.stdout == text
    assert (
        "\ufffd"
        in run(
            "import sys; sys.stdout.buffer.write(b'\\xff')", limits=PATIENT, unsafe=unsafe
        ).stdout
    )
    # half a character, as a model may write
    assert run("print('\ud800')", limits=PATIENT, unsafe=unsafe).status == 0


@pytest.fixture
def other_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_has_worked", False)
    return tmp_path


def test_a_missing_bubblewrap_is_said_in_a_line(other_path: Path) -> None:
    (error,) = sandbox.sandbox_errors("episode.tools")
    assert error.where == "episode.tools"
    assert "bubblewrap (bwrap) is not installed; install bubblewrap" in str(error)
    with pytest.raises(UserError, match="^reward.function: .*; install .* `unsafe: true`$"):
        run("print('ran')")
    with pytest.raises(UserError, match="^episode.environment: bubblewrap .* is not installed"):
        SandboxInterpreter(PATIENT, 0, where="episode.environment")
    assert sandbox.sandbox_errors("episode.tools", unsafe=True) == []
    assert run("print('ran')", limits=PATIENT, unsafe=True).stdout == "ran\n"


def test_a_bubblewrap_that_does_not_work_is_said_in_a_line(other_path: Path) -> None:
    path = other_path / "bwrap"
    path.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"
    )
    path.chmod(0o755)
    (error,) = sandbox.sandbox_errors("episode.tools")
    assert "does not work on this machine (bwrap: No permissions to create a new namespace)" in str(
        error
    )
    assert "\n" not in str(error)
