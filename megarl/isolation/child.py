"""The inside of a worker process: the socket to its parent, its limits, and its end with its keeper."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

from megarl.isolation.inside_launcher import limit
from megarl.isolation.keeper import die_with
from megarl.isolation.service import listen
from megarl.printable import plain_value
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_M_ARENA_MAX = -8
LINE_BYTES = 2**30  # of the parent's longest line
HELLO = "worker"  # the first message of a worker: this and its process id
SERVICE = "service"  # begins a message about a call of a service: this, the service's name, the event and words
SOCKET_CLOSED = 117  # exit code
MEMORY_FULL = 118  # exit code
OUT_OF_MEMORY = "ran out of memory"
# freed when the memory is full, so that the process can still report it
_spare = [bytes(4 * 2**20)]


class ParentSocket:
    """The socket, out of the function's reach: what the function prints goes to standard error, its input is empty."""

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=os.dup(0))
        self._file = self.socket.makefile("rb")
        self._lock = threading.Lock()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # a process is ended without notice

    def read(self) -> Any:
        """The next message, or None at the end."""
        with _exit_if_closed():
            line = self._file.readline()
        return json.loads(line) if line else None

    def write(self, line: bytes) -> None:
        """May be called in any thread."""
        with self._lock, _exit_if_closed():
            self.socket.sendall(line)

    def close_in_child(self) -> None:
        """Close the copy of a process that the function forks, which would hide the end of this one from the parent."""
        descriptor = self.socket.detach()
        if descriptor >= 0:  # the process that forks may itself be one that the function has forked
            os.close(descriptor)


@contextmanager
def _exit_if_closed() -> Iterator[None]:
    """Exit with a code that the parent knows if the function has closed the socket."""
    try:
        yield
    except OSError:
        os._exit(SOCKET_CLOSED)


def serve(main: Callable[[ParentSocket, JsonObject], object], parent_pid: int) -> None:
    """Call a worker's `main` with the socket to its parent and its spec; tell the parent a UserError that it raises.

    parent_pid: of the process that started the worker's keeper.
    """
    parent = ParentSocket()
    parent.write(as_line([HELLO, os.getpid()]))
    spec = parent.read()
    if spec is None or parent_pid != spec["parent"]:
        return  # the parent ended before it was watched
    os.environ.pop("PYTHONPATH", None)  # what the function starts gets the parent's; sys.path stays
    if spec["python_path"] is not None:
        os.environ["PYTHONPATH"] = spec["python_path"]
    os.register_at_fork(after_in_child=parent.close_in_child)
    _end_forks_with_worker()
    try:
        main(parent, spec)
    except UserError as error:
        parent.write(as_line([error.where, error.problem, error.hint]))


def as_line(message: object) -> bytes:
    """A message as its line. Raises TypeError, ValueError or RecursionError for what JSON cannot hold."""
    return json.dumps(message, default=plain_value).encode() + b"\n"


def tell_service_events(write: Callable[[list[str]], object]) -> None:
    """Let the parent know what calls of services meet. write: sends it a message, from any thread."""
    listen(lambda service, event, words: write([SERVICE, service, event, words]))


def tell_service_events_in_order(write: Callable[[list[str]], object]) -> None:
    """`tell_service_events` of a worker whose replies are written in the running event loop, which alone calls `write`.

    What a call has met is written before the call ends, and so before the reply of the job that it is a part of.
    """
    loop = asyncio.get_running_loop()
    loop_thread = threading.get_ident()

    def tell(message: list[str]) -> None:
        if threading.get_ident() == loop_thread:
            write(message)
        else:
            loop.call_soon_threadsafe(write, message)

    tell_service_events(tell)


def _end_forks_with_worker() -> None:
    """Let the kernel end what the worker's main thread forks itself, as `multiprocessing` does, with the worker.

    The keeper ends what the worker has started. Where the keeper is killed, as Ray kills the children of an actor that
    it ends, it cannot. What another thread has forked would die with that thread, and a fork's fork with the fork:
    these stay. Called in the main thread.
    """
    worker = os.getpid()
    main_thread = threading.get_ident()
    is_forked = False

    def die_with_worker() -> None:
        nonlocal is_forked
        if not is_forked and threading.get_ident() == main_thread:
            die_with(worker)
        is_forked = True

    os.register_at_fork(after_in_child=die_with_worker)


def limit_memory(memory_mb: int) -> None:
    """Limit the address space to what the process has now and `memory_mb` more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_mb * 2**20)
    limit(resource.RLIMIT_CORE, 0)


def share_heap() -> None:
    """Let threads have no heaps of their own: each reserves 64 MiB of the address space that is limited."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def free_spare_memory() -> None:
    """Make room to report that the memory is full, once."""
    _spare.clear()


def too_long(timeout_s: float) -> str:
    """The words of a job that exceeded its time."""
    return f"took longer than {timeout_s:g} s"
