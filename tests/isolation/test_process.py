"""One worker process of each kind, with its keeper, before it has been told what to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megarl.isolation import process as worker_process
from megarl.isolation.child import HELLO
from megarl.isolation.process import WorkerProcess

_REWARD_HOST = "megarl.rollout.reward_workers.reward_host"
_MODULES = [
    _REWARD_HOST,
    "megarl.environments.agents.agent_host",
    "megarl.environments.runtime.environment_host",
]
_HEAVY = ["torch", "sglang", "ray", "pyarrow", "transformers", "httpx", "bm25s"]
Start = Callable[[str], tuple[WorkerProcess, psutil.Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(module): the process and its worker, which has imported the module and waits for its spec."""
    started: list[WorkerProcess] = []

    def run(module: str) -> tuple[WorkerProcess, psutil.Process]:
        process = WorkerProcess(module, {}, 1 << 16)
        started.append(process)
        process._socket.settimeout(120)
        hello, pid = json.loads(process._socket.recv(1 << 16))
        assert hello == HELLO
        return process, psutil.Process(pid)

    yield run
    for process in started:
        process.process.kill()
        process.process.wait()
        process._socket.close()


@pytest.mark.parametrize("module", _MODULES)
def test_the_keeper_has_forked_before_any_library_was_imported(start: Start, module: str) -> None:
    """A library's threads are the worker's, where its limit of memory counts their stacks; the keeper has one."""
    _, worker = start(module)
    keeper = worker.parent()
    assert keeper
    libraries = [
        any("numpy" in mapping.path for mapping in process.memory_maps())
        for process in (keeper, worker)
    ]
    assert (libraries, keeper.num_threads()) == ([False, True], 1)


@pytest.mark.parametrize("module", _MODULES[1:])
def test_a_worker_imports_nothing_heavy(module: str) -> None:
    heavy = _HEAVY if "runtime" in module else [*_HEAVY, "pydantic", "megarl.config"]
    script = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "[]\n"


def test_a_stopped_keeper_ends_its_worker(start: Start) -> None:
    process, worker = start(_REWARD_HOST)
    process.process.send_signal(signal.SIGSTOP)
    process.kill()
    assert process.process.wait(60) == -signal.SIGTERM
    assert not worker.is_running()


def test_a_keeper_that_does_not_act_is_killed_with_its_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_KEEPER_ENDS_S", 0.2)
    process, worker = start(_REWARD_HOST)
    monkeypatch.setattr(
        process.process, "terminate", lambda: process.process.send_signal(signal.SIGSTOP)
    )
    monkeypatch.setattr(signal, "SIGCONT", signal.SIGSTOP)
    process.kill()
    process.reap()
    assert process.process.returncode == -signal.SIGKILL
    assert psutil.wait_procs([worker], timeout=60)[1] == []


_FORKS = """
import json, os, threading, time

def fork():
    pid = os.fork()
    if not pid:
        time.sleep(1000)
        os._exit(0)
    return pid

def main(parent, spec):
    pids = [fork()]
    thread = threading.Thread(target=lambda: pids.append(fork()))
    thread.start()
    thread.join()
    reader, writer = os.pipe()
    daemon = os.fork()
    if not daemon:
        os.write(writer, b"%d" % fork())
        os._exit(0)
    os.waitpid(daemon, 0)
    parent.write(json.dumps([*pids, int(os.read(reader, 100))]).encode())
    parent.read()
"""


def test_what_a_worker_has_forked_ends_with_it_where_its_keeper_is_killed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But nothing ends before: not with a thread, nor with a process that has only made a daemon."""
    (tmp_path / "forking_worker.py").write_text(_FORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    process, worker = start("forking_worker")
    process._socket.sendall(
        json.dumps({"parent": os.getpid(), "python_path": None}).encode() + b"\n"
    )
    forked, *others = map(psutil.Process, json.loads(process._socket.recv(1 << 16)))
    try:
        assert psutil.wait_procs([forked, *others], timeout=0.2)[0] == []
        process.process.kill()
        assert psutil.wait_procs([worker, forked], timeout=60)[1] == []
    finally:
        for left in (forked, *others):
            with suppress(psutil.NoSuchProcess):
                left.kill()
