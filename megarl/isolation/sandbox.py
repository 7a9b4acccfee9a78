"""Runs an untrusted Python program: in bubblewrap's namespaces, with limits of each process and a deadline.

The program sees the system's libraries and a bare Python, read-only, an empty /tmp of its own and no network. Memory is
limited per process; a program can take at most that times the limit on processes, and the kernel kills it first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from megarl.isolation import bubblewrap
from megarl.isolation.bubblewrap import ENVIRONMENT
from megarl.isolation.seccomp import filter_program
from megarl.isolation.service import Service, Unavailable
from megarl.types import UserError

HINT = "install bubblewrap, or run without isolation: `unsafe: true`"
_LAUNCHER = Path(__file__).with_name("inside_launcher.py").read_text(encoding="utf-8")
_ENDS_WITHIN_S = 10.0  # how long the kernel may take to end a killed namespace
_CHUNK_BYTES = 1 << 16
_has_worked = False
# Starting a program is what fails for a while, where a machine is short of memory or processes.
SERVICE = Service(f"the sandbox of {socket.gethostname()}")


class SandboxError(Unavailable):
    """The sandbox has not started a program. The text is the reason."""


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of a program. cpu_s, memory_mb, file_mb and open_files are per process; tmp_mb: of all its files.

    stdout_bytes and stderr_bytes are kept; a program that writes more to stdout is killed.
    """

    wall_s: float = 4.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    file_mb: int = 16
    tmp_mb: int = 64
    processes: int = 32
    open_files: int = 64
    stdout_bytes: int = 1 << 20
    stderr_bytes: int = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How a program ended. status: as a shell's, 128 + the signal that ended it; None: it was killed from outside."""

    status: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    too_much_output: bool = False


@dataclass(frozen=True)
class Started:
    """A program's process, and what is told of it.

    info: the pipe to which bwrap writes its child's process id (`first_of_namespace`); None without isolation. begun:
    the pipe that gets a byte when the program itself begins (`has_begun`).
    """

    process: subprocess.Popen[bytes]
    info: IO[bytes] | None
    begun: IO[bytes]


def sandbox_errors(where: str, *, unsafe: bool = False, hint: str = HINT) -> list[UserError]:
    """The error of a machine on which programs cannot be isolated, found by starting bwrap; [] where they can.

    where: the recipe key that asks for a sandbox. unsafe: no isolation is asked for, so that there is no error.
    """
    problem = "" if unsafe else find_problem()
    if problem:
        return [UserError(where, problem, hint)]
    return []


def find_problem() -> str:
    """The reason why bubblewrap does not work on this machine, tested until it has worked once; "" if it works."""
    global _has_worked
    if _has_worked:
        return ""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    try:
        outcome = _run("print('works')", "", SandboxLimits(wall_s=60.0), unsafe=False)
    except (OSError, SandboxError) as error:
        return f"bubblewrap does not work on this machine ({error})"
    if outcome.stdout == "works\n":
        _has_worked = True
        return ""
    reason = (outcome.stderr.strip().splitlines() or [f"exit status {outcome.status}"])[-1]
    return f"bubblewrap does not work on this machine ({reason})"


def run(
    program: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    *,
    where: str,
    unsafe: bool = False,
    hint: str = HINT,
) -> Outcome:
    """Run a program's text to its end or its limits; none of its processes and files remain.

    unsafe: with limits and a process group only, in a folder of its own. It has this user's rights, and a daemon that
    it starts may remain. Raises UserError(where) with the hint where there is no isolation, and ServiceError where the
    program could not be started, though that was tried several times.
    """
    for error in sandbox_errors(where, unsafe=unsafe, hint=hint):
        raise error
    return SERVICE.call_plain(
        lambda left_s: _run(program, stdin, limits or SandboxLimits(), unsafe=unsafe)
    )


def _run(program: str, stdin: str, limits: SandboxLimits, *, unsafe: bool) -> Outcome:
    with ExitStack() as held:
        folder = None
        if unsafe:
            folder = held.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        stdin_fd = held.enter_context(_sealed(stdin))
        started = start(program, limits, folder, threading.get_native_id(), stdin_fd)
        held.enter_context(started.begun)
        return _watch(started, limits)


def start(
    program: str,
    limits: SandboxLimits,
    folder: str | None,
    user_number: int,
    stdin: int,
    output: int = subprocess.PIPE,
    hash_seed: int = -1,
) -> Started:
    """Start a program.

    folder: its own, in which it runs without isolation; None: it is isolated. user_number: as of `bubblewrap.uid`.
    output: for standard output and error. hash_seed: of the hashes of texts, which order sets; -1: another in every
    process.
    """
    begun_read, begun_write = os.pipe()
    settings = {
        **asdict(limits),
        "uid": None,
        "die_with_parent": folder is not None,
        "hash_seed": hash_seed,
        "begun": begun_write,
    }
    begin = partial(
        subprocess.Popen[bytes],
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        if folder is None:
            process, info = _start_isolated(program, limits, settings, user_number, begin)
        else:
            path = Path(folder, "main.py")
            path.write_text(program, encoding="utf-8", errors="replace")
            environment = ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
            line = _launch(settings, str(path))
            process = begin(line, env=environment, cwd=folder, pass_fds=(begun_write,))
            info = None
    except BaseException:
        os.close(begun_read)
        raise
    finally:
        os.close(begun_write)
    return Started(process, info, os.fdopen(begun_read, "rb"))


def _start_isolated(
    program: str,
    limits: SandboxLimits,
    settings: dict[str, Any],
    user_number: int,
    begin: Callable[..., subprocess.Popen[bytes]],
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The process of bwrap, and the pipe to which it writes its child's process id."""
    settings = {**settings, "uid": bubblewrap.uid(user_number)}
    refused_calls = filter_program()
    with _sealed(program) as source, _sealed(refused_calls or b"") as seccomp:
        info_read, info_write = os.pipe()
        line = bubblewrap.command(
            source, seccomp if refused_calls else None, info_write, limits.tmp_mb << 20
        )
        line += _launch(settings, "/tmp/main.py")
        passed = (source, seccomp, info_write, settings["begun"])
        try:
            # An empty environment: the one that bwrap itself was started with can be read in /proc/1.
            process = begin(line, env={}, pass_fds=passed)
        except BaseException:
            os.close(info_read)
            raise
        finally:
            os.close(info_write)
    return process, os.fdopen(info_read, "rb")


def has_begun(begun: IO[bytes]) -> bool:
    """Whether a program that has ended, or of which `begun` can be read, had begun. begun: as of `Started`."""
    return os.read(begun.fileno(), 1) != b""


def _launch(settings: dict[str, Any], path: str) -> list[str]:
    """The command line of the launcher, which becomes the program at this path."""
    return [bubblewrap.interpreter(), "-I", "-S", "-c", _LAUNCHER, json.dumps(settings), path]


@contextmanager
def _sealed(content: str | bytes) -> Iterator[int]:
    """A descriptor of a file in memory, at its start; processes that inherit it cannot change the file."""
    descriptor = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        file.flush()
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK,
        )
        file.seek(0)
        yield descriptor


class _Bounded:
    """The first bytes of a pipe."""

    def __init__(self, pipe: IO[bytes], most_bytes: int) -> None:
        self.pipe = pipe
        self.most_bytes = most_bytes
        self.content = bytearray()
        self.full = False
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Read once, without waiting; False at the end, or when there is nothing to read."""
        try:
            chunk = os.read(self.pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        room = self.most_bytes - len(self.content)
        self.content += chunk[:room]
        self.full = self.full or len(chunk) > room
        return bool(chunk)

    def text(self) -> str:
        while not self.full and self.read():
            pass
        return self.content.decode("utf-8", "replace")


def _watch(started: Started, limits: SandboxLimits) -> Outcome:
    """Read until the program ends, or kill it. Raises SandboxError where the sandbox ended before the program began."""
    process = started.process
    assert process.stdout and process.stderr
    deadline = time.monotonic() + limits.wall_s
    with process.stdout, process.stderr:
        out = _Bounded(process.stdout, limits.stdout_bytes)
        error = _Bounded(process.stderr, limits.stderr_bytes)
        outer = os.pidfd_open(process.pid)
        first = first_of_namespace(process.pid, started.info, limits.wall_s)
        try:
            ended = _follow(outer, out, error, deadline)
        finally:
            os.close(outer)
            status = end_program(process, first)
        stdout = out.text()
        stderr = error.text()
    if status < 0:  # -1 times the signal
        status = 128 - status
    if ended and not has_begun(started.begun):
        raise SandboxError((stderr.strip().splitlines() or [f"exit status {status}"])[-1])
    return Outcome(
        status if ended else None,
        stdout,
        stderr,
        timed_out=not ended and not out.full,
        too_much_output=out.full,
    )


def end_program(process: subprocess.Popen[bytes], first: int | None) -> int:
    """Kill and reap a program with what it has started. first: as of `first_of_namespace`; the exit status."""
    if first is None:
        _kill_children(process.pid)
    else:  # its whole namespace ends with it, and then bwrap, which reaps it
        outer = os.pidfd_open(process.pid)
        _end(first)
        _await_end(outer)
        os.close(outer)
    os.killpg(process.pid, signal.SIGKILL)  # also after its end, for the processes of its group
    return process.wait()


def _kill_children(parent: int) -> None:
    """Kill the descendants of a process, which may have left its process group."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def _follow(outer: int, out: _Bounded, error: _Bounded, deadline: float) -> bool:
    """Whether the program ended by itself, before the deadline and before it wrote too much."""
    with selectors.DefaultSelector() as selector:
        selector.register(outer, selectors.EVENT_READ)
        for pipe in (out, error):
            selector.register(pipe.pipe, selectors.EVENT_READ, pipe)
        while (left := deadline - time.monotonic()) > 0 and not out.full:
            for key, _ in selector.select(left):
                if key.data is None:
                    return True
                if not key.data.read():
                    selector.unregister(key.fileobj)
    return False


def first_of_namespace(parent: int, info: IO[bytes] | None, wall_s: float) -> int | None:
    """A descriptor of process 1 in the sandbox, with which all others end.

    None: it has ended, or never began, or there is no sandbox. info: as of `Started`; it is closed.
    """
    if info is None:
        return None
    written = b""
    with info, selectors.DefaultSelector() as selector:
        selector.register(info, selectors.EVENT_READ)
        while b"}" not in written:
            chunk = os.read(info.fileno(), _CHUNK_BYTES) if selector.select(wall_s) else b""
            if not chunk:
                return None
            written += chunk
    pid = json.loads(written)["child-pid"]
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError):
        # Another process may have its id by now.
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
            return descriptor
    os.close(descriptor)
    return None


def _end(first: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)
    _await_end(first)
    os.close(first)


def _await_end(process: int) -> None:
    """Raises RuntimeError when a killed process does not end, so that the caller has no outcome to judge."""
    with selectors.DefaultSelector() as selector:
        selector.register(process, selectors.EVENT_READ)
        if not selector.select(_ENDS_WITHIN_S):
            raise RuntimeError(f"a killed sandbox still exists after {_ENDS_WITHIN_S:.0f} s")
