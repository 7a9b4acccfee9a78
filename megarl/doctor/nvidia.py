"""The facts of a node's GPUs, from `nvidia-smi`, whose output is parsed, and the driver's files; changes nothing.

The formats are those that `nvidia-smi --help-query-gpu` and `nvidia-smi topo --help` document. This code has not yet
run on a GPU (docs/gpu/UNVERIFIED.md).
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from megarl.doctor.facts import Gpu, GpuFacts, Topology
from megarl.doctor.machine import text_of

_ANSWER_S = 60.0  # a GPU that has fallen off the bus makes nvidia-smi wait
REASONS = "clocks_event_reasons.active"
_OLD_REASONS = "clocks_throttle_reasons.active"  # the name in drivers before 535
FIELDS: tuple[str, ...] = (
    "index", "name", "pci.bus_id", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", REASONS,
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "pcie.link.width.current", "pcie.link.width.max",
    "compute_cap", "driver_version",
)  # fmt: skip
# NVML's nvmlClocksEventReasons that reduce the clocks of a busy GPU. Idle (0x1), an application's own setting (0x2) and
# the power cap (0x4), which every busy GPU reaches, are no problem of the machine.
_SLOWDOWNS = {
    0x8: "hardware slowdown (heat, or the power supply)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(GPU|NIC)\d+$|mlx5_\d+$")
_NIC_NAME = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+(?:\.\d+)?)")


def gpu_facts(proc: Path = Path("/proc")) -> GpuFacts:
    """The GPUs' facts; empty without nvidia-smi, for then megarl cannot use a GPU."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts()
    has_peermem = any(
        line.startswith("nvidia_peermem ") for line in text_of(proc / "modules").splitlines()
    )
    has_open_driver = "Open Kernel Module" in text_of(proc / "driver/nvidia/version")
    try:
        gpu_list, driver = _asked_gpus()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return GpuFacts(_words(error), has_peermem=has_peermem, has_open_driver=has_open_driver)
    head = matrix = ""
    with suppress(OSError, subprocess.SubprocessError):  # containers hide the topology from some
        head = _ask()
        matrix = _ask("topo", "-m")
    return GpuFacts(
        "",
        driver,
        driver_cuda(head),
        tuple(gpu_list),
        topology(matrix),
        has_peermem,
        has_open_driver,
    )


def _asked_gpus() -> tuple[list[Gpu], str]:
    """The GPUs and the driver's version; drivers before 535 have another name for the clocks' reasons."""
    try:
        return gpus(_ask(*query()))
    except subprocess.CalledProcessError:
        return gpus(_ask(*query([_OLD_REASONS if name == REASONS else name for name in FIELDS])))


def _ask(*arguments: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *arguments], check=True, capture_output=True, text=True, timeout=_ANSWER_S
    ).stdout


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_ANSWER_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        # nvidia-smi writes errors to standard output
        lines = (error.stdout + error.stderr).strip().splitlines()
        return lines[0] if lines else f"exit code {error.returncode}"
    return str(error)


def query(fields: Sequence[str] = FIELDS) -> list[str]:
    """The arguments of nvidia-smi for `gpus`."""
    return [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def gpus(text: str) -> tuple[list[Gpu], str]:
    """The GPUs and the driver's version, from the answer to `query`. Raises ValueError on another format."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    for row in rows:
        if len(row) != len(FIELDS):
            raise ValueError(f"{len(row)} values where {len(FIELDS)} were asked for")
    cells = [dict(zip(FIELDS, map(str.strip, row), strict=True)) for row in rows]
    return [_gpu(of_gpu) for of_gpu in cells], cells[-1]["driver_version"] if cells else ""


def _gpu(value: dict[str, str]) -> Gpu:
    return Gpu(
        index=int(value["index"]),
        name=value["name"],
        pci=pci_address(value["pci.bus_id"]),
        memory_bytes=_mebibytes(value["memory.total"]),
        used_bytes=_mebibytes(value["memory.used"]),
        sm_mhz=_number(value["clocks.sm"]),
        max_sm_mhz=_number(value["clocks.max.sm"]),
        clock_reasons=_whole(value[REASONS]),
        ecc_errors=_whole(value["ecc.errors.uncorrected.volatile.total"]),
        mig=value["mig.mode.current"] == "Enabled",
        pcie_width=_whole(value["pcie.link.width.current"]),
        max_pcie_width=_whole(value["pcie.link.width.max"]),
        compute_capability=value["compute_cap"],
    )


def pci_address(text: str) -> str:
    """The address as in /sys/bus/pci/devices: "00000000:18:00.0" with a domain of four digits, in lower case."""
    domain, _, bus_address = text.lower().partition(":")
    return f"{domain[-4:]}:{bus_address}"


def driver_cuda(text: str) -> str:
    """The newest CUDA that the driver supports, from the heading of plain `nvidia-smi`; "" where it is missing."""
    match = _CUDA.search(text)
    return match[1] if match else ""


def topology(text: str) -> Topology:
    """The matrix and the cards' names of `nvidia-smi topo -m`; empty where there is no matrix."""
    lines = _ANSI.sub("", text).splitlines()
    rows = [line.split() for line in lines]
    heads = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [*takewhile(_DEVICE.match, heads)]
    links = {}
    for row in rows:
        if row and row is not heads and row[0] in columns and row[0] not in links:
            cells = dict(zip(columns, row[1:], strict=False))
            links[row[0]] = {name: kind for name, kind in cells.items() if kind != "X"}
    return Topology(links, dict(_NIC_NAME.findall(_ANSI.sub("", text))))


def slowdowns(mask: int) -> list[str]:
    """Descriptions of the reasons for reduced clocks."""
    return [words for bit, words in _SLOWDOWNS.items() if mask & bit]


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    if number is None:
        return None
    return int(number) * 2**20


def _number(text: str) -> float | None:
    """None for "[N/A]", "[Not Supported]" and their like."""
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    """A number, also as "0x0000000000000004"."""
    try:
        return int(text, 0)
    except ValueError:
        return None
