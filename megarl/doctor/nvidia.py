"""Parses the output of `nvidia-smi`. Pure.

The formats are those that `nvidia-smi --help-query-gpu` and `nvidia-smi topo --help` document. This code has not yet
run on a GPU (docs/gpu/UNVERIFIED.md).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import takewhile

from megarl.doctor.facts import Gpu, Topology

REASONS = "clocks_event_reasons.active"
OLD_REASONS = "clocks_throttle_reasons.active"  # the name in drivers before 535
FIELDS: tuple[str, ...] = (
    "index", "name", "pci.bus_id", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", REASONS,
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "pcie.link.width.current", "pcie.link.width.max",
    "compute_cap", "driver_version",
)  # fmt: skip
_MIB = 2**20
# NVML's nvmlClocksEventReasons that reduce the clocks of a busy GPU. Idle (0x1), an application's own setting (0x2) and
# the power cap (0x4), which every busy GPU reaches, are no problem of the machine.
SLOWDOWNS = {
    0x8: "hardware slowdown (heat, or the power supply)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(GPU|NIC)\d+$|mlx5_\d+$")
_NIC_NAME = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)
_CUDA = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+(?:\.\d+)?)")


def query(fields: Sequence[str] = FIELDS) -> list[str]:
    """The arguments of nvidia-smi for `gpus`."""
    return [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def gpus(text: str) -> tuple[list[Gpu], str]:
    """The GPUs and the driver's version, from the answer to `query`. Raises ValueError on another format."""
    found, driver = [], ""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(FIELDS):
            raise ValueError(f"{len(row)} values where {len(FIELDS)} were asked for")
        value = {name: cell.strip() for name, cell in zip(FIELDS, row, strict=True)}
        driver = value["driver_version"]
        found.append(_gpu(value))
    return found, driver


def _gpu(value: dict[str, str]) -> Gpu:
    memory, used = _number(value["memory.total"]), _number(value["memory.used"])
    return Gpu(
        index=int(value["index"]),
        name=value["name"],
        pci=pci_address(value["pci.bus_id"]),
        memory_bytes=None if memory is None else int(memory) * _MIB,
        used_bytes=None if used is None else int(used) * _MIB,
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
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


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
    return [words for bit, words in SLOWDOWNS.items() if mask & bit]


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
