"""The keeper of a worker process: a small process between it and its parent that ends all that the worker has started.

A program that the worker's function starts may leave its process group, its session and its parent (a daemon that
forks twice). The keeper is the subreaper of all of them (prctl(2), PR_SET_CHILD_SUBREAPER), so that they stay its
descendants. It kills them when the worker ends, when the parent asks for it by SIGTERM, and when the parent dies.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILLS_FOR_S = 10.0  # what the kernel does not end until then cannot be ended from here
_BETWEEN_KILLS_S = 0.005


def fork_worker() -> int:
    """Fork the worker off this process, which becomes its keeper and does not return.

    Returns in the worker, in a session of its own and with an empty signal mask: the process id of the keeper's parent.
    The keeper closes its copy of standard input and output, and ends as the worker does: with its exit code, or by its
    signal. It must be called while the process has one thread: as `entry` does, before anything else is imported.
    """
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = os.getppid()
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a parent may pass on that it is ignored: then nobody can be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        _keep(worker)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    os.setsid()
    die_with(keeper)
    return parent


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, or the thread of the parent that has forked it."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before the line above
        os._exit(1)


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _keep(worker: int) -> None:
    """Wait for the worker's end, or for SIGTERM; then end everything."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    status = None
    while status is None:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            status = signal.SIGTERM
        for pid, ended_with in _reaped():
            if pid == worker:
                status = ended_with
    _kill_descendants()
    _end_as(status)


def _reaped() -> Iterator[tuple[int, int]]:
    """The process id and wait status of every child that has ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, status


def _kill_descendants() -> None:
    """Kill the children until there are none: the children of each become this process's own as it dies."""
    until = time.monotonic() + KILLS_FOR_S
    while (children := _children()) and time.monotonic() < until:
        for pid in children:
            # of a program with another user's rights
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for _ in _reaped():
            pass
        time.sleep(_BETWEEN_KILLS_S)


def _children() -> list[int]:
    """The process ids of the children of this process, ended ones that were not waited for among them."""
    own_pid = str(os.getpid())
    children = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with (
            suppress(OSError),
            open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file,
        ):
            if file.read().rpartition(")")[2].split()[1] == own_pid:
                children.append(int(name))
    return children


def _end_as(status: int) -> None:
    """End this process as a wait status says."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a second core file would say nothing
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
