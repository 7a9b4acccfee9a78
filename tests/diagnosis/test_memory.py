"""Real allocations that fail, and the words by which logs tell of others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.device import DEVICE
from megarl.diagnosis.memory import is_out_of_memory, kernel_kills, memory_error_in

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, resource, sys
import psutil, torch
from megarl.device import DEVICE
from megarl.diagnosis.memory import is_out_of_memory, memory_use
torch.ones(1, device=DEVICE)
used = psutil.Process().memory_info().vms
if DEVICE == "cpu":
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
for allocate in (lambda: torch.empty(2**45, dtype=torch.uint8, device=DEVICE), lambda: bytearray(2**50)):
    try:
        allocate()
    except Exception as error:
        use = memory_use(error)
        print(json.dumps([type(error).__name__, is_out_of_memory(error), use.words, use.bytes_by_name]))
"""


def test_an_allocation_that_fails_is_told_with_what_the_process_holds():
    """Unverified on a GPU: look first at the keys of torch's `memory_stats`."""
    told = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, cwd=ROOT)
    of_torch, of_python = map(json.loads, told.splitlines())
    assert of_torch[1] is True and of_python[:3] == ["MemoryError", True, "MemoryError"]
    for *_, table in (of_torch, of_python):
        if DEVICE == "cuda":
            assert 0 < table["allocated"] <= table["peak allocated"] < table["the GPU"]
            assert table["free"] <= table["the GPU"] and table["used by others"] >= 0
            continue
        assert of_torch[0] == "RuntimeError" and f"{2**45} bytes" in of_torch[2]
        assert 2**20 < table["resident set"] < table["address space"] < table["its limit"]
        assert 0 < table["free in the machine"] <= table["the machine"]


def test_other_errors_are_none_of_memory():
    for error in (
        RuntimeError("shapes differ"),
        MemoryError("5 bytes, of which the node has 3"),
        ValueError(),
    ):
        assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        "MemoryError",
        "  what():  std::bad_alloc",
        "Task was killed due to the node running low on memory.",
    ],
)
def test_a_log_tells_of_memory(line: str):
    said = line.strip()
    assert memory_error_in(f"Traceback (most recent call last):\n  {'frame'}\n{line}\nend") == said
    assert memory_error_in(f"MemoryError\n{line}\nend") == said, "the last"
    assert memory_error_in("RuntimeError: shapes differ\nNo MemoryErrors here") == ""


def test_the_kernel_counts_the_processes_that_it_kills(tmp_path: Path):
    events = tmp_path / "memory.events"
    assert kernel_kills(events) == 0
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert kernel_kills(events) == 2
