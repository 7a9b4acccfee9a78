"""What is asked of nvidia-smi, with programs of that name that say what the documents say it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.doctor.gpus import gpu_facts
from megarl.doctor.nvidia import REASONS
from tests.doctor.nodes import BUSES, SMI_HEAD, fake_smi, smi_csv, smi_topology


def test_gpus_topology_and_driver_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, smi_csv(), smi_topology(), SMI_HEAD)
    proc = tmp_path / "proc"
    (proc / "driver/nvidia").mkdir(parents=True)
    (proc / "modules").write_text("nvidia_peermem_not 1 0\nnvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2\n")
    (proc / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n")
    found = gpu_facts(proc)
    assert (found.error, found.driver, found.driver_cuda) == ("", "580.65.06", "13.0")
    assert [gpu.pci[5:7] for gpu in found.gpus] == [*BUSES]
    assert found.topology.links["GPU0"]["GPU1"] == "NV8"
    assert found.has_peermem and found.has_open_driver
    bare = gpu_facts(tmp_path / "nothing")
    assert not bare.has_peermem and not bare.has_open_driver


def test_an_older_driver_is_asked_by_the_older_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, smi_csv(), smi_topology(), SMI_HEAD, refused=REASONS)
    assert len(gpu_facts(tmp_path).gpus) == 8


def test_a_driver_that_does_not_answer_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    fake_smi(tmp_path, monkeypatch, "", "", "", fails=said)
    found = gpu_facts(tmp_path)
    assert (found.error, found.gpus) == (said, ())


def test_without_the_program_there_is_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts(tmp_path).gpus == () and gpu_facts(tmp_path).error == ""
