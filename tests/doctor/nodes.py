"""Facts of a node of eight H800s on which nothing is wrong, and what `nvidia-smi` would say there.

The texts are written after the formats that NVIDIA documents, with an HGX machine's values; no GPU has printed them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megarl.doctor import nvidia
from megarl.doctor.facts import UNLIMITED, Folder, Nic, NodeFacts, ProcessLimits, Torch

ADDRESS = "10.0.0.1"
BUSES = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")


def smi_csv(**changed: dict[int, str]) -> str:
    """`nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; changed: by the field's first word and the GPU."""
    lines = []
    for index, bus in enumerate(BUSES):
        cells = [
            str(index), "NVIDIA H800", f"00000000:{bus.upper()}:00.0", "81559", "4", "345", "1980",
            "0x0000000000000001", "0", "Disabled", "16", "16", "9.0", "580.65.06",
        ]  # fmt: skip
        for field, values in changed.items():
            if index in values:
                place = [name.replace(".", "_") for name in nvidia.FIELDS].index(field)
                cells[place] = values[index]
        lines.append(", ".join(cells))
    return "\n".join(lines) + "\n"


def smi_topology(**changed: str) -> str:
    """`nvidia-smi topo -m` with eight GPUs and eight cards; changed: GPU0_GPU1="SYS"."""
    devices = [f"GPU{number}" for number in range(8)] + [f"NIC{number}" for number in range(8)]

    def kind(one: str, two: str) -> str:
        if one == two:
            return " X "
        if other := changed.get(f"{one}_{two}") or changed.get(f"{two}_{one}"):
            return other
        if one[:3] == two[:3] == "GPU":
            return "NV8"
        if one[3] == two[3]:
            return "PIX"
        return "NODE" if (one[3] < "4") == (two[3] < "4") else "SYS"

    affinities = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    lines = ["\t\x1b[4m" + "\t".join(devices) + f"\t{affinities}\x1b[0m"]
    for device in devices:
        row = "\t".join([device, *(kind(device, other) for other in devices)])
        lines.append(
            f"{row}\t0-47,96-143\t0\t\tN/A" if device.startswith("GPU") else f"{row}\t\t\t"
        )
    lines += [
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  NV#  = Connection of # NVLinks",
        "",
        "NIC Legend:",
    ]
    return "\n".join([*lines, *(f"  NIC{number}: mlx5_{number}" for number in range(8)), ""])


SMI_HEAD = (
    "| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |\n"
)


def sound(**changed: Any) -> NodeFacts:
    """A node with nothing to mend; changed: fields that are otherwise."""
    gpus, driver = nvidia.gpus(smi_csv())
    names = [f"mlx5_{number}" for number in range(8)]
    folders = (
        Folder("/shared/runs", "run.dir", True, True, 10**15, 10**14, 10**9, "lustre", "", 5e9),
    )
    values: dict[str, Any] = {
        "host": "one", "address": ADDRESS, "kernel": "6.8.0", "python": "3.12.3", "num_cores": 192,
        "host_bytes": 2 * 10**12, "shm_total_bytes": 10**12, "shm_free_bytes": 10**12,
        "limits": ProcessLimits(UNLIMITED, 2**20, UNLIMITED), "driver": driver,
        "driver_cuda": nvidia.driver_cuda(SMI_HEAD),
        "gpus": tuple(gpus), "topology": nvidia.topology(smi_topology()), "has_peermem": True,
        "nics": tuple(Nic(name, 1, True, 400.0, "InfiniBand") for name in names),
        "gpu_nics": {gpu.pci: name for gpu, name in zip(gpus, names, strict=True)},
        "torch": Torch("2.13.0+cu130", "13.0", "2.28.9", "91400", 8),
        "versions": {
            "torch": "2.13.0", "megatron-core": "0.16.1", "ray": "2.60.0", "transformers": "5.12.1",
            "sglang": "0.5.21", "sglang-kernel": "0.4.7", "transformer-engine": "2.9.0", "torch-memory-saver": "0.0.9",
        },
        "import_errors": {
            "transformer_engine.pytorch": "", "sgl_kernel": "", "flashinfer": "", "flash_attn": "not installed",
            "torch_memory_saver": "",
        },
        "pins": {"sglang-kernel": "0.4.7", "torch": "2.13.0"}, "source": "0123456789ab", "folders": folders,
        "environment": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
    }  # fmt: skip
    return NodeFacts(**(values | changed))


def fake_smi(
    folder: Path,
    patch: pytest.MonkeyPatch,
    csv: str,
    topology: str,
    head: str,
    *,
    refused: str = "",
    fails: str = "",
) -> None:
    """Put a program `nvidia-smi` first on PATH that prints these texts; refused: a field that it does not know."""
    for name, text in {"csv": csv, "topology": topology, "head": head, "fails": fails}.items():
        (folder / f"smi.{name}").write_text(text)
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
if [ -s {folder}/smi.fails ]; then cat {folder}/smi.fails; exit 18; fi
case "$*" in
    *{refused or "no-such-field"}*) echo 'Field "{refused}" is not a valid field to query.'; exit 2 ;;
    "--query-gpu="*" --format=csv,noheader,nounits") cat {folder}/smi.csv ;;
    "topo -m") cat {folder}/smi.topology ;;
    "") cat {folder}/smi.head ;;
    *) exit 6 ;;
esac
""")
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
