"""The facts of a node's RDMA cards, from /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.topology import SYSFS, nearest_nics, placement_among, placement_faults
from megarl.doctor.facts import Nic

_RATE = re.compile(r"([\d.]+)\s*Gb/sec")


def nics(root: Path = SYSFS) -> list[Nic]:
    """Every port of every card, by name."""
    folder = root / "class/infiniband"
    cards = sorted(folder.iterdir(), key=lambda card: (len(card.name), card.name)) if folder.exists() else []
    return [_port(card.name, port) for card in cards for port in sorted((card / "ports").glob("[0-9]*"))]


def gpu_nics(gpus: Sequence[str], root: Path = SYSFS) -> dict[str, str]:
    """The card that each GPU of the node sends through; gpus: PCI addresses, of which some may be missing in /sys."""
    return nearest_nics(_present(gpus, root), root, os.environ.get("NCCL_IB_HCA", ""))


def nic_faults(gpus: Sequence[str], address: str, root: Path = SYSFS) -> list[str]:
    """The problems that a run's own check reports: cards that several GPUs share, or that are on another socket."""
    present = _present(gpus, root)
    placements = [placement_among(slot, present, address, root) for slot in range(len(present))]
    return [fault.problem for fault in placement_faults(placements)]


def _present(gpus: Sequence[str], root: Path) -> list[str]:
    return [gpu for gpu in gpus if (root / "bus/pci/devices" / gpu).exists()]


def _port(name: str, port: Path) -> Nic:
    rate = _RATE.search(_text(port / "rate"))
    return Nic(
        name=name,
        port=int(port.name),
        is_up="ACTIVE" in _text(port / "state"),
        gbit_per_s=float(rate[1]) if rate else None,
        link_layer=_text(port / "link_layer"),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
