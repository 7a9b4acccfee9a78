"""The chaos runner's own parts: faults that are drawn, processes that are hit, and the page of its results."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts import chaos, chaos_faults
from scripts.chaos_page import page


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
