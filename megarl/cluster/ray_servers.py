"""Ray's servers on this machine (raylet, gcs_server): finding their processes and noticing their death. Linux."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import psutil

from megarl.cluster import processes

_LONGEST_LOOK_S = 2.0


class RayServers:
    """The raylet of a socket, and the gcs_server of its session where it runs on this machine too.

    When one of them dies, Ray itself reports it only after a minute, or ends this process.
    """

    def __init__(self, raylet_socket: str, timeout_s: float) -> None:
        """timeout_s: how long a server may be stopped by a signal."""
        self._timeout_s, self._looked_at = timeout_s, time.monotonic()
        found = _servers(raylet_socket)
        self._stopped_s = dict.fromkeys(found, 0.0)
        self._descriptors = {os.pidfd_open(process.pid): process for process in found}
        self._poll = select.poll()
        for descriptor in self._descriptors:
            self._poll.register(descriptor, select.POLLIN)

    def fault(self) -> str | None:
        """A description of the server that has died, or was stopped for too long; None when all are well."""
        for descriptor, _ in self._poll.poll(0):
            return f"Ray's {_name(self._descriptors[descriptor])} {_how(descriptor)}"
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        for process, before_s in self._stopped_s.items():
            self._stopped_s[process] = before_s + passed_s if processes.is_stopped(process.pid) else 0.0
            if self._stopped_s[process] >= self._timeout_s:
                return f"Ray's {_name(process)} has stood still for {self._timeout_s:g} s: a signal stopped it"
        return None

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def _servers(raylet_socket: str) -> list[psutil.Process]:
    session = Path(raylet_socket).parents[1].name
    wanted = {"raylet": f"--raylet_socket_name={raylet_socket}", "gcs_server": f"--session-name={session}"}
    running = psutil.process_iter(["name", "cmdline"])
    return [process for process in running if wanted.get(process.info["name"]) in (process.info["cmdline"] or ())]


def _name(process: psutil.Process) -> str:
    return f"{process.info['name']} (pid {process.pid})"


def _how(descriptor: int) -> str:
    """How a process ended; the exit status is known of child processes only."""
    try:
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "has ended"
    if result is None or result.si_code == os.CLD_EXITED:
        return "has ended" if result is None else f"ended with exit code {result.si_status}"
    return f"was killed by {signal.Signals(result.si_status).name}"
