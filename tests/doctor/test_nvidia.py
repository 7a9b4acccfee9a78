"""The words of nvidia-smi, in the formats that NVIDIA documents, from programs of that name too."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.doctor import nvidia
from megarl.doctor.facts import Gpu, GpuFacts, Topology
from tests.doctor.nodes import BUSES, SMI_HEAD, fake_smi, smi_csv, smi_topology


def test_a_line_is_a_gpu_in_bytes_and_by_its_pci_address() -> None:
    gpus, driver = nvidia.gpus(smi_csv())
    assert driver == "580.65.06"
    assert [gpu.pci for gpu in gpus] == [f"0000:{bus}:00.0" for bus in BUSES]
    assert gpus[1] == Gpu(
        1,
        "NVIDIA H800",
        "0000:2a:00.0",
        81559 * 2**20,
        4 * 2**20,
        345.0,
        1980.0,
        1,
        0,
        False,
        16,
        16,
        "9.0",
    )


def test_what_a_card_does_not_have_is_none() -> None:
    text = smi_csv(
        ecc_errors_uncorrected_volatile_total={0: "[N/A]"}, clocks_event_reasons_active={0: "[Not Supported]"},
        mig_mode_current={0: "[N/A]", 1: "Enabled"}, memory_used={0: "[Insufficient Permissions]"},
    )  # fmt: skip
    first, second, *_ = nvidia.gpus(text)[0]
    assert first.ecc_errors is first.clock_reasons is first.used_bytes is None
    assert second.mig and not first.mig


def test_another_format_is_an_error_and_no_gpu_is_none() -> None:
    with pytest.raises(ValueError, match="2 values where 14"):
        nvidia.gpus("0, NVIDIA H800\n")
    assert nvidia.gpus("\n") == ([], "")


@pytest.mark.parametrize(
    ("head", "version"),
    [
        (SMI_HEAD, "13.0"),
        ("| NVIDIA-SMI 590.44.01   Driver Version: 590.44.01   CUDA UMD Version: 13.1 |", "13.1"),
        ("CUDA Version                              : 12.4", "12.4"),
        ("| CUDA Version: N/A |", ""),
        ("", ""),
    ],
)
def test_the_newest_cuda_of_the_driver(head: str, version: str) -> None:
    assert nvidia.driver_cuda(head) == version


def test_the_matrix_of_gpus_and_cards() -> None:
    topology = nvidia.topology(smi_topology(GPU2_GPU5="SYS"))
    assert [*topology.links] == [f"GPU{n}" for n in range(8)] + [f"NIC{n}" for n in range(8)]
    assert topology.links["GPU2"]["GPU5"] == topology.links["GPU5"]["GPU2"] == "SYS"
    assert topology.links["GPU0"]["GPU7"] == "NV8" and "GPU0" not in topology.links["GPU0"]
    assert (topology.links["GPU3"]["NIC3"], topology.links["GPU3"]["NIC4"]) == ("PIX", "SYS")
    assert topology.links["NIC0"]["NIC1"] == "NODE"
    assert topology.nics == {f"NIC{n}": f"mlx5_{n}" for n in range(8)}


def test_the_matrix_of_one_gpu_and_of_none() -> None:
    matrix = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    matrix += "GPU0\t X \tPHB\t0-251\t0\t\tN/A\nNIC0\tPHB\t X \t\t\t\n"
    assert nvidia.topology(matrix).links == {"GPU0": {"NIC0": "PHB"}, "NIC0": {"GPU0": "PHB"}}
    assert (
        nvidia.topology("Failed to initialize NVML: Driver/library version mismatch\n")
        == Topology()
    )


def test_cards_by_name_as_older_drivers_have_them() -> None:
    text = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\n"
    text += "GPU0\t X \tNV6\tPIX\t0-23\nGPU1\tNV6\t X \tPXB\t0-23\nmlx5_0\tPIX\tPXB\t X \n"
    assert nvidia.topology(text).links["mlx5_0"] == {"GPU0": "PIX", "GPU1": "PXB"}


@pytest.mark.parametrize(
    ("mask", "count"),
    [(0x0, 0), (0x1, 0), (0x4, 0), (0x2, 0), (0x8, 1), (0x60, 2), (0x80 | 0x4, 1), (0x100, 0)],
)
def test_only_what_slows_a_machine_down_counts(mask: int, count: int) -> None:
    assert len(nvidia.slowdowns(mask)) == count


def test_gpus_topology_and_driver_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, smi_csv(), smi_topology(), SMI_HEAD)
    proc = tmp_path / "proc"
    (proc / "driver/nvidia").mkdir(parents=True)
    (proc / "modules").write_text(
        "nvidia_peermem_not 1 0\nnvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2\n"
    )
    (proc / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n"
    )
    assert nvidia.query()[0] == f"--query-gpu={','.join(nvidia.FIELDS)}"
    facts = nvidia.gpu_facts(proc)
    assert (facts.nvidia_smi, facts.driver, facts.driver_cuda) == ("", "580.65.06", "13.0")
    assert [gpu.pci[5:7] for gpu in facts.gpus] == [*BUSES]
    assert facts.topology.links["GPU0"]["GPU1"] == "NV8"
    assert facts.has_peermem and facts.has_open_driver
    bare = nvidia.gpu_facts(tmp_path / "nothing")
    assert not bare.has_peermem and not bare.has_open_driver


def test_an_older_driver_is_asked_by_the_older_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, smi_csv(), smi_topology(), SMI_HEAD, refused=nvidia.REASONS)
    assert len(nvidia.gpu_facts(tmp_path).gpus) == 8


def test_a_driver_that_does_not_answer_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Failed to initialize NVML: Driver/library version mismatch"
    fake_smi(tmp_path, monkeypatch, "", "", "", fails=message)
    facts = nvidia.gpu_facts(tmp_path)
    assert (facts.nvidia_smi, facts.gpus) == (message, ())


def test_without_the_program_there_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.gpu_facts(tmp_path) == GpuFacts()
