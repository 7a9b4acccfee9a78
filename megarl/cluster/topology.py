"""Which network card each GPU of a node sends through: the nearest in the PCIe tree, for as few GPUs a card as can be.

NCCL chooses in the same way but says so in its log alone; here the choice can be shown before the first byte is sent.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl import device
from megarl.types import UserFault

SYSFS = Path("/sys")
_WHERE = "placement"


@dataclass(frozen=True)
class DevicePlacement:
    """Where a process sits: node, its address, the PCI address of its GPU and the name of that GPU's RDMA card.

    "" without a GPU, or without a card. sharers: GPUs of the node on this card. crosses: between GPU and card lies the
    link between the sockets.
    """

    host: str
    address: str
    gpu: str
    nic: str
    sharers: int = 0
    crosses: bool = False


@dataclass(frozen=True)
class _Place:
    """Of a PCI device: the bridges above it, from the root complex down, itself last; -1 where no socket is its own."""

    path: tuple[str, ...]
    socket: int

    @staticmethod
    def of(folder: Path) -> _Place:
        resolved, numa = folder.resolve(), folder / "numa_node"
        return _Place(resolved.parts, int(numa.read_text()) if numa.exists() else -1)

    def nearness(self, other: _Place) -> tuple[int, bool]:
        """The deeper the nearest common bridge the greater; below different root complexes the same socket counts."""
        pairs = zip(self.path, other.path, strict=False)
        shared = next((depth for depth, (one, two) in enumerate(pairs) if one != two), len(self.path))
        return shared, not self.is_apart(other)

    def is_apart(self, other: _Place) -> bool:
        """On another socket, as far as both are known."""
        return -1 not in (self.socket, other.socket) and self.socket != other.socket


def nearest_nics(gpus: Sequence[str], root: Path = SYSFS, wanted: str = "") -> dict[str, str]:
    """The RDMA card of each GPU of a node, of those alone whose link is up; {} where there is none.

    gpus: PCI addresses ("0000:18:00.0"). wanted: as NCCL_IB_HCA. No card serves more GPUs than gpus / cards, rounded
    up. Taking the nearest pair first is best here: of what hangs on one bridge all is equally near to all else.
    """
    cards = {name: _Place.of(root / "class/infiniband" / name / "device") for name in _cards(root, wanted)}
    places = {gpu: _gpu(gpu, root) for gpu in gpus}
    pairs = [(gpu, name) for gpu in gpus for name in cards]
    pairs.sort(key=lambda pair: places[pair[0]].nearness(cards[pair[1]]), reverse=True)  # stable: ties as they come
    found: dict[str, str] = {}
    load: Counter[str] = Counter()
    for gpu, name in pairs:
        if gpu not in found and load[name] < math.ceil(len(gpus) / len(cards)):
            found[gpu] = name
            load[name] += 1
    return {gpu: found[gpu] for gpu in gpus if gpu in found}


def device_placement(slot: int, address: str, root: Path = SYSFS) -> DevicePlacement:
    """Of the process that calls this, which uses GPU `slot` of its node and sees all of them."""
    gpus = [_pci_address(index) for index in range(torch.cuda.device_count())] if device.DEVICE == "cuda" else []
    return seat_of(slot, gpus, address, root)


def seat_of(slot: int, gpus: Sequence[str], address: str, root: Path = SYSFS) -> DevicePlacement:
    """`seat` among GPUs whose PCI addresses are known; without any: a seat without GPU and card."""
    host = socket.gethostname()
    if not gpus:
        return DevicePlacement(host, address, "", "")
    gpu, nics = gpus[slot], nearest_nics(gpus, root, os.environ.get("NCCL_IB_HCA", ""))
    if gpu not in nics:
        return DevicePlacement(host, address, gpu, "")
    card = _Place.of(root / "class/infiniband" / nics[gpu] / "device")
    sharers = list(nics.values()).count(nics[gpu])
    return DevicePlacement(host, address, gpu, nics[gpu], sharers, card.is_apart(_gpu(gpu, root)))


def device_placement_lines(device_placements: Sequence[DevicePlacement]) -> list[str]:
    """A line for each node, in the order of its first rank; seats[rank]."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for rank, one in enumerate(device_placements):
        said = " ".join(word for word in (one.gpu, one.nic and f"through {one.nic}") if word)
        ranks.setdefault((one.host, one.address), []).append(f"{rank} {said}".strip())
    return [f"{host} ({address}): ranks {', '.join(words)}" for (host, address), words in ranks.items()]


def device_placement_faults(device_placements: Sequence[DevicePlacement]) -> list[UserFault]:
    """What slows a node's fabric down: GPUs that share a card, and cards on the other socket. seats[rank]."""
    shared: dict[tuple[str, str], list[str]] = {}
    found = []
    for rank, one in enumerate(device_placements):
        if one.sharers > 1:
            shared.setdefault((one.host, one.nic), []).append(str(rank))
        if one.crosses:
            problem = f"on {one.host} rank {rank}'s GPU {one.gpu} sends through {one.nic}, which is on the other socket"
            found.append(UserFault(_WHERE, problem, "name the cards of GPUs in NCCL_IB_HCA, or mend the node's cards"))
    for (host, nic), ranks in shared.items():
        problem = f"on {host} ranks {', '.join(ranks)} share the network card {nic}"
        mend = "book nodes with a card for each GPU, or let placement.hardware say the share of a card"
        found.append(UserFault(_WHERE, problem, mend))
    return found


def _cards(root: Path, wanted: str) -> list[str]:
    """RDMA cards by number (mlx5_2 before mlx5_10) of which a port is up."""
    folder = root / "class/infiniband"
    names = [one.name for one in folder.iterdir() if _is_up(one)] if folder.exists() else []
    return sorted((name for name in names if _is_wanted(name, wanted)), key=lambda name: (len(name), name))


def _is_up(card: Path) -> bool:
    return any("ACTIVE" in state.read_text() for state in card.glob("ports/*/state"))


def _is_wanted(name: str, wanted: str) -> bool:
    """NCCL_IB_HCA: names with commas between, or their beginnings; after "^" all others, after "=" these exactly."""
    negates = wanted.startswith("^")
    listed = wanted.removeprefix("^")
    exact = listed.startswith("=")
    asked = [one.partition(":")[0] for one in listed.removeprefix("=").split(",") if one]
    if not asked:
        return True
    return any(name == one if exact else name.startswith(one) for one in asked) != negates


def _gpu(address: str, root: Path) -> _Place:
    return _Place.of(root / "bus/pci/devices" / address)


def _pci_address(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
