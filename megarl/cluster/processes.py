"""Signals that end a run, the processes that it must not leave behind, and those of Ray, whose death ends it. Linux."""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
STOPPED_S = 6.0  # for which a signal may stop a process of a run: nobody stops one for work
_REAP_S = 5.0
_LONGEST_LOOK_S = 2.0
_SAME_SIGNAL_S = 1.0
_AGENT = "Agent"  # RuntimeEnvAgent, DashboardAgent
REMEDY = "start the command again, a run with --resume"

_terminated = threading.Event()
_end_wanted = threading.Event()
_report_wanted = threading.Event()


def raise_on_sigterm() -> None:
    """Turn SIGTERM (Slurm, `kill`) into KeyboardInterrupt, so that a run ends through its `with` blocks.

    Ray's waits let no other exception through. The same SIGTERM comes twice where a scheduler sends it to all processes
    of a job, of which this one's supervisor passes it on.
    """
    last_s = -math.inf

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        is_the_same = time.monotonic() - last_s < _SAME_SIGNAL_S
        last_s = time.monotonic()
        if is_the_same:
            return  # perhaps within the first one, which holds the event's lock
        _terminated.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def was_terminated() -> bool:
    """Whether the KeyboardInterrupt was a SIGTERM."""
    return _terminated.is_set()


def note_sigusr1() -> None:
    """Take SIGUSR1 (Slurm, some minutes before the time limit) as a request to end soon; a second one is a SIGTERM.

    The handler only sets a flag, so that the run, with its calls to Ray, continues to a point where it can end. The
    same signal comes twice where it is sent to all processes of a command, of which its supervisor passes it on.
    """
    last_s = -math.inf

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        is_the_same = time.monotonic() - last_s < _SAME_SIGNAL_S
        last_s = time.monotonic()
        if is_the_same:
            return
        if _end_wanted.is_set():
            signal.raise_signal(signal.SIGTERM)
        _end_wanted.set()

    signal.signal(signal.SIGUSR1, handler)


def is_end_wanted() -> bool:
    """Whether SIGUSR1 has come."""
    return _end_wanted.is_set()


def note_sigusr2() -> None:
    """Take SIGUSR2 as a request to tell what the run waits for."""

    def handler(signum: int, frame: FrameType | None) -> None:
        _report_wanted.set()

    signal.signal(signal.SIGUSR2, handler)


def take_report_request() -> bool:
    """Whether SIGUSR2 has come since the last call."""
    was_wanted = _report_wanted.is_set()
    _report_wanted.clear()
    return was_wanted


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that kill_descendants finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(spare: Collection[int] = ()) -> list[psutil.Process]:
    """Every descendant of this process, except the process ids in `spare` and their descendants."""
    processes: list[psutil.Process] = []
    waiting = psutil.Process(os.getpid()).children()
    while waiting:
        process = waiting.pop()
        if process.pid in spare:
            continue
        processes.append(process)
        with suppress(psutil.NoSuchProcess):
            waiting += process.children()
    return processes


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP, Ctrl-Z): it exists and does nothing."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def could_run(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a processor or a disk; other threads wait for an event."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                # the name, in brackets, may have spaces
                state, *_ = (thread / "stat").read_text().rpartition(")")[2].split()
                if state in "RD":
                    return True
    return False


def kill_descendants(spare: Collection[int]) -> None:
    """SIGKILL and reap every descendant of this process, except those in `spare` and their descendants."""
    left = descendants(spare)
    while left:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_REAP_S)
        alive = descendants(spare)
        if {process.pid for process in alive} == {process.pid for process in left}:
            return  # unkillable (kernel wait): nothing more can be done from here
        left = alive


def kill_tree(pid: int) -> None:
    """SIGKILL a process of this node and all of its descendants, whether or not a signal has stopped them."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=_REAP_S)


def remove_counters(pids: Collection[int], folder: Path = SHARED_MEMORY) -> None:
    """Remove torch's reference counters of CUDA IPC memory, `torch_<pid>_*`, of processes that have ended.

    Torch removes them when a process exits, but the processes of a run are killed. A file that is older than this
    command, or another user's, belongs to a process of another container with the same id.
    """
    ending: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            ending.append(psutil.Process(pid))
    alive = {process.pid for process in psutil.wait_procs(ending, timeout=_REAP_S)[1]}
    began = psutil.Process().create_time()
    for pid in {*pids} - alive:
        for file in folder.glob(f"torch_{pid}_*"):
            with suppress(OSError):
                status = file.lstat()
                if status.st_uid == os.geteuid() and status.st_mtime >= began:
                    file.unlink()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore the signals that end a run: a second signal must not interrupt the cleanup after the first."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class RayServers:
    """The raylet of a socket, and the gcs_server of its session where it runs on this machine too.

    When one of them dies, Ray itself reports it only after a minute, or ends this process. A raylet ends by itself when
    one of its agents has.
    """

    def __init__(self, raylet_socket: str, timeout_s: float) -> None:
        """timeout_s: how long a server may be stopped by a signal."""
        self._timeout_s = timeout_s
        self._looked_at = time.monotonic()
        servers = _servers(raylet_socket)
        agents = [agent for server in servers for agent in _agents(server)]
        self._stopped_s = dict.fromkeys(servers, 0.0)
        self._names = {process: _name(process) for process in (*servers, *agents)}
        self._running = {os.pidfd_open(process.pid): process for process in self._names}
        # in the order in which they did; those of the same look in the order of the line above
        self._ended: dict[int, psutil.Process] = {}

    def descriptors(self) -> list[int]:
        """Of the processes that have not ended yet; each can be read from when its process does."""
        return [*self._running]

    @property
    def has_failed(self) -> bool:
        """Whether one of them had ended or was stopped when `error` was called last; any thread may ask."""
        ended = {*self._ended.values()}
        return not ended.isdisjoint(self._stopped_s) or any(self._stopped_s.values())

    def error(self) -> str | None:
        """A description of the server that has died, or was stopped for too long; None when all are well."""
        self._await_end(0)
        if not self._stopped_s.keys().isdisjoint(self._ended.values()):
            descriptor, first = next(iter(self._ended.items()))
            is_agent = first not in self._stopped_s
            how = "has ended, and with it its raylet" if is_agent else _how(descriptor)
            return f"Ray's {self._names[first]} {how}; {REMEDY}"
        now = time.monotonic()
        passed_s = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        for process, before_s in self._stopped_s.items():
            self._stopped_s[process] = before_s + passed_s if is_stopped(process.pid) else 0.0
            if self._stopped_s[process] >= self._timeout_s:
                return f"Ray's {self._names[process]} has stood still for {self._timeout_s:g} s: a signal stopped it"
        return None

    def _await_end(self, timeout_s: float) -> None:
        """Wait until another process ends, at most so long, and note all that have ended."""
        poll = select.poll()
        for descriptor in self._running:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * timeout_s):
            self._ended[descriptor] = self._running.pop(descriptor)

    def await_error(self, timeout_s: float) -> str | None:
        """The same, as soon as a server has died, which is known to come; None where it does not in this time."""
        until = time.monotonic() + timeout_s
        while not (error := self.error()) and (left_s := until - time.monotonic()) > 0:
            self._await_end(left_s)
        return error

    def close(self) -> None:
        for descriptor in (*self._running, *self._ended):
            os.close(descriptor)
        self._running.clear()
        self._ended.clear()


class RayletWatch:
    """Kills the raylet of this worker's node once a signal has stopped it for STOPPED_S: Ray gives up its node at once.

    By Ray's own health checks that takes 25 s. For a worker on another node than the controller's.
    """

    def __init__(self, pid: int) -> None:
        """pid: of the raylet, which has started this process."""
        self._raylet = psutil.Process(pid)
        self._looked_at = time.monotonic()
        self._stopped_s = 0.0

    def kill_if_stopped(self) -> None:
        """Kill it where it has been stopped for too long, counting at most 2 s since the last call.

        This process may have been suspended itself.
        """
        now = time.monotonic()
        passed_s = min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        self._stopped_s = self._stopped_s + passed_s if is_stopped(self._raylet.pid) else 0.0
        if self._stopped_s >= STOPPED_S:
            with suppress(psutil.NoSuchProcess):
                self._raylet.kill()


def _servers(raylet_socket: str) -> list[psutil.Process]:
    session = Path(raylet_socket).parents[1].name
    arguments_by_name = {
        "raylet": f"--raylet_socket_name={raylet_socket}",
        "gcs_server": f"--session-name={session}",
    }
    servers = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if arguments_by_name.get(process.info["name"]) in (process.info["cmdline"] or ())
    ]
    # where both have ended, the raylet was probably the first
    return sorted(servers, key=lambda server: server.info["name"] != "raylet")


def _agents(server: psutil.Process) -> list[psutil.Process]:
    """The agents of a raylet."""
    agents = []
    with suppress(psutil.NoSuchProcess):
        for process in server.children():
            with suppress(psutil.NoSuchProcess):  # a worker that ends
                if _AGENT in process.name():
                    agents.append(process)
    return agents


def _name(process: psutil.Process) -> str:
    return f"{process.name().removeprefix('ray::')} (pid {process.pid})"


def _how(descriptor: int) -> str:
    """How a process ended; the exit status is known of child processes only."""
    result = None
    with suppress(ChildProcessError):
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return "has ended"
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by {signal.Signals(result.si_status).name}"
