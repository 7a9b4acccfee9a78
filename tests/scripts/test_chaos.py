"""The chaos runner's own parts: faults that are drawn, processes that are hit, and the page of its results."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scripts import chaos, chaos_faults, chaos_network
from scripts.chaos_page import page

_ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
accepted, _ = listener.accept()
while received := accepted.recv(1):
    accepted.sendall(received)
"""


def test_a_fault_is_the_same_whichever_command_draws_it() -> None:
    many = list(chaos._faults("critic", 1, range(40)))
    assert list(chaos._faults("critic", 1, range(30, 40))) == many[30:]
    assert list(chaos._faults("critic", 2, range(40))) != many
    for _, fault in many:
        assert fault.role in chaos_faults.KINDS[fault.kind]


@pytest.mark.parametrize("run", chaos.RUNS)
def test_every_role_of_a_run_is_hit(run: str) -> None:
    drawn = {fault.role for _, fault in chaos._faults(run, 1, range(400))}
    assert drawn == {*chaos.RUNS[run].roles}


def test_sockets_of_another_process_are_shut() -> None:
    program = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "print(flush=True); print(s.recv(1))"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", program, str(port)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            process.stdout.readline()
            accepted, _ = server.accept()
            chaos_faults.hit("sockets", process.pid)
            assert process.stdout.readline() == "b''\n"
            accepted.close()


def test_a_process_gets_no_more_memory() -> None:
    program = "print(flush=True); input(); b = bytes(2**28)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        process.stdout.readline()
        chaos_faults.hit("memory", process.pid)
        _, err = process.communicate("go\n")
    assert "MemoryError" in err


def test_processes_that_are_left_are_named(tmp_path: Path) -> None:
    leftovers = chaos_faults.Leftovers(str(tmp_path))
    process = subprocess.Popen(["sleep", "600"], env={chaos_faults.MARKER: str(tmp_path)})
    assert [line.split()[1] for line in leftovers._processes()] == [str(process.pid)]
    psutil.Process(process.pid).send_signal(signal.SIGKILL)
    process.wait()
    assert leftovers._processes() == []


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(),
    reason="it needs root and a loop device",
)
def test_a_disk_is_full_at_once_and_well_again_afterwards(tmp_path: Path) -> None:
    disk = chaos_faults.Disk(tmp_path, 2**24)
    try:
        file = disk.path / "file"
        with disk.broken("full"), pytest.raises(OSError, match="No space left"):
            file.write_bytes(b"1")
        file.write_bytes(b"2")
        assert file.read_bytes() == b"2"
    finally:
        disk.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bridge") is None, reason="it needs root and iproute2"
)
def test_what_is_sent_while_the_network_is_cut_comes_when_it_is_healed() -> None:
    """No connection is reset, none is refused, and nothing of the network is left."""
    before = {*psutil.net_if_addrs(), *_namespaces()}
    with chaos_network.Network(2) as network:
        _, address = network.addresses
        command = ["nsenter", f"--net={network.namespaces[address]}", sys.executable, "-c", _ECHO]
        with subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True) as echo:
            assert echo.stdout
            port = int(echo.stdout.readline())
            with socket.create_connection((address, port), timeout=60.0) as connection:
                connection.sendall(b"1")
                assert connection.recv(1) == b"1"
                network.cut(address)
                connection.sendall(b"2")
                with pytest.raises(TimeoutError):
                    socket.create_connection((address, port), timeout=0.1)
                network.heal(address)
                assert connection.recv(1) == b"2"
    assert {*psutil.net_if_addrs(), *_namespaces()} == before


def _namespaces() -> list[str]:
    folder = "/run/netns"
    return os.listdir(folder) if os.path.exists(folder) else []


def _result(outcome: str, ended_s: float, **more: Any) -> dict[str, Any]:
    fault = {"kind": "kill", "role": "rank", "phase": "train", "share": 0.5}
    result = {
        "run": "plain", "index": 3, "fault": fault, "step": 4, "outcome": outcome, "detected_s": 1.5,
        "ended_s": ended_s, "lost_s": 10.0, "cause": "", "left": [],
    }  # fmt: skip
    return result | more


def test_the_page_counts_outcomes_and_names_what_must_not_be() -> None:
    results = [
        _result("recovered", 12.0),
        _result("ended", 70.0, lost_s=30.0, index=4),
        {"run": "plain", "restart_s": 40.0},
        {"run": "plain", "end": {"differences": ["samples.jsonl"], "left": []}},
    ]
    written = page(results, "# Chaos\n\nWhat it is.\n")
    assert written.startswith("# Chaos\n\nWhat it is.\n\n<!--")
    assert "2 faults, of which 2 hit somebody, in 1 runs of 1 kinds" in written
    assert "| kill | rank | 2 | 1 | 1 | 0 | 0 | 0 | 1.5 | 20.0 | 0.50 |" in written
    assert "- plain 4: kill rank in train of step 4 took 70 s (ended)" in written
    assert "- plain: differs: samples.jsonl" in written
    assert page(results, written) == written, "it can be made anew"


def test_the_last_line_of_a_number_counts() -> None:
    end = {"run": "plain", "faults": [3, 4], "end": {"differences": ["samples.jsonl"], "left": []}}
    good = {"run": "plain", "faults": [3], "end": {"differences": [], "left": []}}
    results = [_result("hung", 200.0), _result("ended", 9.0, index=4), end]
    again = [_result("recovered", 12.0), good]
    assert "plain 3: kill rank in train of step 4 hung" in page(results)
    written = page([*results, *again])
    assert "2 faults, of which 2 hit somebody, in 1 runs of 1 kinds" in written
    assert "Exceptions:" not in written


def test_a_run_that_has_said_its_error_and_does_not_end_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever steps it has recorded before."""
    monkeypatch.setattr(chaos, "HUNG_S", -1.0)
    fault = chaos_faults.Fault("kill", "rank", "train", 0.5)
    run: Any = SimpleNamespace(
        new_text=lambda _: "megarl: WorkerFailed: rank 0: its process died\n",
        is_running=True,
        process=SimpleNamespace(returncode=None),
        steps=9,
        state=lambda: {"step": 5},
    )
    outcome = chaos.Outcome(fault, step=4)
    chaos._watch(run, outcome, 0, ExitStack())
    assert outcome.outcome == "hung"
