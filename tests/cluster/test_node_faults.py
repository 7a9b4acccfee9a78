"""What is a node's fault, and how the job's script hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cluster.node_faults import NodeFaults, hardware_error
from megarl.cluster.node_slots import ReservedNode


def node(number: int) -> ReservedNode:
    return ReservedNode(f"id{number}", f"10.0.0.{number}", f"n{number}", 6000, number)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "uncorrectable ECC error"),
        ("RuntimeError: no CUDA-capable device is detected", "no CUDA-capable device is detected"),
        ("CUDA error: unknown error\nCUDA kernel errors might be asynchronously", "CUDA error: unknown error"),
        ("CUDA error: an illegal memory access was encountered", None),
        ("CUDA error: unspecified launch failure", None),
        ("CUDA out of memory. Tried to allocate 2 GiB", None),
        ("ValueError: unknown error of the reward", None),
        ("NCCL error: remote process exited or there was a network error", None),
    ],
)  # fmt: skip
def test_what_only_hardware_does_is_its_fault(text: str, error: str | None) -> None:
    assert hardware_error(text) == error


def test_a_fault_is_reported_once_and_a_suspicion_until_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_BAD_NODES", str(tmp_path / "bad_nodes"))
    said: list[str] = []
    faults = NodeFaults(said.append)
    faults.note(node(1), "fault", "it died\n(of what)")
    faults.note(node(1), "fault", "it is still dead")
    for attempt in range(3):
        assert faults.is_bad(node(2)) == (attempt == 2)
        faults.note(node(2), "suspicion", f"attempt {attempt}")
    assert [faults.is_bad(node(number)) for number in (1, 2, 3)] == [True, True, False]
    assert (tmp_path / "bad_nodes").read_text().splitlines() == [
        "n1\tfault\tit died\\n(of what)",
        "n2\tsuspicion\tattempt 0",
        "n2\tsuspicion\tattempt 1",
    ]
    assert said[0].startswith("node n1 (10.0.0.1): it died") and len(said) == 3


def test_a_run_without_a_script_only_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGARL_BAD_NODES", raising=False)
    said: list[str] = []
    NodeFaults(said.append).note(node(1), "fault", "it died")
    assert said == ["node n1 (10.0.0.1): it died"]


def test_a_report_that_cannot_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_BAD_NODES", "/nowhere/bad_nodes")
    said: list[str] = []
    NodeFaults(said.append).note(node(1), "fault", "it died")
    assert said[1] == (
        "/nowhere/bad_nodes cannot be written (No such file or directory): the job does not exclude the node"
    )
