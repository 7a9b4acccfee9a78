"""The parent of a command that uses Ray: it says how the command ended where the command itself could not. Linux.

Ray ends a process from C++, without a Python exception, as soon as one of its threads finds that the raylet's object
store has closed the connection; the kernel ends one that is out of memory. So the command runs in a child process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from megarl.cluster import processes
from megarl.cluster.node_faults import report
from megarl.cluster.session_folder import SESSION_PARENT, SESSION_PREFIX, remove_dead
from megarl.disk import begin, has_ended
from megarl.isolation.keeper import die_with
from megarl.printable import one_line
from megarl.types.losses import THE_RUN, Loss

_LOOK_S = 30.0  # between two looks at which processes there are
_RAYLET_ENDS_S = 5.0  # a raylet closes its object store before it ends
_FAILED = 1
_WRITE_S = 2.0  # for which a page may stay unwritten
_PAGE = (
    "command_ended"  # and a number from the second on: a resumed run keeps the pages from before
)
_UNKNOWN = "the command was ended before it could say what it waited for; metrics.jsonl has the steps before"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)

_to_supervisor: int | None = None  # a pipe, in a process that has a supervisor
_may_fork = False  # whether this process was started for a command


def let_be_supervised() -> None:
    """This process was started for a command, and not for a program that calls one, such as a test."""
    global _may_fork
    _may_fork = True


def in_child(run: Callable[[], int], last_word: Callable[[object], None]) -> int:
    """`supervised` where this process was started for a command; another program's would be doubled."""
    if _may_fork:
        return supervised(run, last_word)
    return run()


def note_session(
    raylet_socket: str,
    node: str | None = None,
    losses: Path | None = None,
    pages: Path | None = None,
) -> None:
    """Tell the supervisor, if there is one, which servers of Ray may end this process by their own end.

    raylet_socket: "" when the session ends. node: the name of this process's own node, if it can be excluded. losses:
    the run's file of them, which gets a line where the process cannot write it. pages: the folder of its pages about
    hangs.
    """
    message: dict[str, object] = {"raylet_socket": raylet_socket, "node": node}
    message["losses"] = losses and str(losses.absolute())
    message["pages"] = pages and str(pages.absolute())
    _tell(message)


def _tell(message: dict[str, object]) -> None:
    if _to_supervisor is not None:
        # the supervisor may have been killed, and this process is about to be
        with suppress(BrokenPipeError):
            os.write(_to_supervisor, (json.dumps(message) + "\n").encode())


def supervised(run: Callable[[], int], last_word: Callable[[object], None]) -> int:
    """The exit code that `run` returns in a child process: this function returns in both of them.

    The child is in a process group of its own and gets the signals for which this process has handlers. If it ends
    before `run` returns, the cause is said by last_word, its processes and session folders are removed, and the exit
    code is that of a failed run. The process must have one thread.
    """
    global _to_supervisor
    processes.adopt_orphans()
    older = {process.pid for process in processes.descendants()}
    reading, writing = os.pipe()
    supervisor = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    command = os.fork()
    if command == 0:
        os.close(reading)
        die_with(supervisor)
        os.setpgid(0, 0)  # a Ctrl-C reaches it once, by its supervisor
        for number in _TERMINAL:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _to_supervisor = writing
        code = run()
        _tell({"code": code})
        return code
    os.close(writing)
    pidfd = os.pidfd_open(command)

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    for number in _SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return _Supervisor(command, pidfd, reading, older).await_end(last_word)


class _Supervisor:
    """Waits for a command, and for the servers of Ray that it depends on."""

    def __init__(self, command: int, pidfd: int, reading: int, older: Collection[int]) -> None:
        """command: its process id. reading: the end of a pipe by which it tells what `_hear` takes.

        older: children of this process from before, which are not the command's.
        """
        self._older = older
        self._command = command
        self._pidfd = pidfd
        self._reading = reading
        self._code: int | None = None
        self._servers: processes.RayServers | None = None
        self._node: str | None = None
        self._losses: Path | None = None
        self._pages: Path | None = None
        # all that the command has had, whose shared memory stays if they are killed
        self._pids: set[int] = set()

    def await_end(self, last_word: Callable[[object], None]) -> int:
        """The exit code of the command; if it could not say why it ends, this is done here."""
        while not self._has_ended():
            if self._servers:
                self._servers.error()  # it notes which of them ends first
            self._pids |= {child.pid for child in psutil.Process().children(recursive=True)}
        if self._code is not None:
            os.waitpid(self._command, 0)
            return self._code
        with processes.interrupts_ignored():
            cause = self._cause()
            self._write_page(cause)
            self._clean_up()
            last_word(f"megarl: {cause}")
            self._note_loss(cause)
            return _FAILED

    def _has_ended(self) -> bool:
        """Wait for the next event, at most _LOOK_S; whether the command has ended and all that it told is heard."""
        poll = select.poll()
        servers = self._servers.descriptors() if self._servers else []
        for descriptor in (self._reading, self._pidfd, *servers):
            poll.register(descriptor, select.POLLIN)
        events = dict(poll.poll(1000 * _LOOK_S))
        if events.get(self._reading, 0) & select.POLLIN:
            for line in os.read(self._reading, 2**16).splitlines():
                self._hear(json.loads(line))
            return False
        return self._pidfd in events

    def _hear(self, message: dict[str, object]) -> None:
        if "code" in message:
            self._code = int(str(message["code"]))
            return
        if self._servers:
            self._servers.close()
        socket = str(message["raylet_socket"])
        self._servers = None
        if socket:
            # what it cannot watch it cannot name, which is no reason to end the run
            with suppress(psutil.Error, ProcessLookupError):
                self._servers = processes.RayServers(socket, math.inf)
        self._node = str(message["node"]) if message["node"] else None
        self._losses = Path(str(message["losses"])) if message["losses"] else None
        self._pages = Path(str(message["pages"])) if message["pages"] else None

    def _cause(self) -> str:
        """Why the command has ended."""
        _, status = os.waitpid(self._command, 0)
        code = os.waitstatus_to_exitcode(status)
        name = f"the command's own process (pid {self._command})"
        if code < 0:
            return f"{name} was killed by {signal.Signals(-code).name}; {processes.REMEDY}"
        error = self._servers and self._servers.await_error(_RAYLET_ENDS_S)
        if not error:
            return f"a library has ended {name} with exit code {code}; {processes.REMEDY}"
        if self._node:
            with suppress(OSError):
                report(self._node, "fault", f"it died ({error})")
        return error

    def _note_loss(self, cause: str) -> None:
        """Write that the run is lost, where its folder is still there."""
        if self._losses:
            with suppress(OSError), self._losses.open("a", encoding="utf-8") as file:
                file.write(Loss.of(THE_RUN, cause, time.time()).line())

    def _write_page(self, cause: str) -> None:
        """The page of a hang, in the command's place: Ray has ended it before it had looked at its processes."""
        if self._pages is None:
            return
        alive = []
        for process in processes.descendants(self._older):
            with suppress(psutil.Error):
                alive.append(f"  {process.name()} (pid {process.pid})")
        lines = [cause, "", _UNKNOWN, "", "PROCESSES THAT WERE ALIVE", *(alive or ["  none"])]
        page = "".join(f"{one_line(line)}\n" for line in lines)
        # a disk that does not answer holds nobody up
        has_ended(begin(partial(_written, self._pages, page)), _WRITE_S)

    def _clean_up(self) -> None:
        self._pids |= {process.pid for process in processes.descendants(self._older)}
        processes.kill_descendants(spare=self._older)
        processes.remove_counters(self._pids)
        remove_dead(SESSION_PREFIX, SESSION_PARENT)


def _written(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    names = itertools.chain(
        [f"{_PAGE}.txt"], (f"{_PAGE}_{number}.txt" for number in itertools.count(2))
    )
    file = next(folder / name for name in names if not (folder / name).exists())
    file.write_text(text, encoding="utf-8")
