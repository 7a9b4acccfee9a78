"""The network card of each GPU of a node: the nearest one in the PCIe tree, with the GPUs spread evenly over the cards.

NCCL chooses in the same way but reports it only in its log; here the choice is known before the first byte is sent. The
nodes themselves are in the order of their addresses.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl import device
from megarl.types import UserError

SYSFS = Path("/sys")


@dataclass(frozen=True)
class DevicePlacement:
    """The node of a process (host name, address), the PCI address of its GPU and the name of the GPU's RDMA card.

    gpu, nic: "" where there is none. sharers: how many GPUs of the node use this card. crosses: whether the GPU and the
    card are on different sockets.
    """

    host: str
    address: str
    gpu: str
    nic: str
    sharers: int = 0
    crosses: bool = False


@dataclass(frozen=True)
class _Place:
    """The place of a PCI device. path: from the root complex down to the device; socket: -1 where it is unknown."""

    path: tuple[str, ...]
    socket: int

    @staticmethod
    def of(folder: Path) -> _Place:
        resolved = folder.resolve()
        numa = folder / "numa_node"
        return _Place(resolved.parts, int(numa.read_text()) if numa.exists() else -1)

    def nearness(self, other: _Place) -> tuple[int, bool]:
        """A sort key: the depth of the nearest common bridge, then whether both are on the same socket."""
        return len(os.path.commonprefix([self.path, other.path])), not self.is_apart(other)

    def is_apart(self, other: _Place) -> bool:
        """Whether both sockets are known, and differ."""
        return -1 not in (self.socket, other.socket) and self.socket != other.socket


def nearest_nics(gpus: Sequence[str], root: Path = SYSFS, wanted: str = "") -> dict[str, str]:
    """The RDMA card of each GPU of a node, among the cards whose link is up; {} without such a card.

    gpus: PCI addresses ("0000:18:00.0"). wanted: a filter in the syntax of NCCL_IB_HCA. No card serves more GPUs than
    gpus / cards, rounded up. Pairing the nearest first is optimal: all devices below a bridge are equally near to any
    device elsewhere.
    """
    cards = {
        name: _Place.of(root / "class/infiniband" / name / "device")
        for name in _cards(root, wanted)
    }
    places = {gpu: _gpu(gpu, root) for gpu in gpus}
    pairs = [(gpu, name) for gpu in gpus for name in cards]
    # stable: ties as they come
    pairs.sort(key=lambda pair: places[pair[0]].nearness(cards[pair[1]]), reverse=True)
    found: dict[str, str] = {}
    load: Counter[str] = Counter()
    for gpu, name in pairs:
        if gpu not in found and load[name] < math.ceil(len(gpus) / len(cards)):
            found[gpu] = name
            load[name] += 1
    return {gpu: found[gpu] for gpu in gpus if gpu in found}


def own_placement(slot: int, address: str, root: Path = SYSFS) -> DevicePlacement:
    """The placement of the calling process, which uses GPU `slot` of its node and sees all of the node's GPUs."""
    if device.DEVICE == "cuda":
        count = torch.cuda.device_count()
    else:
        count = 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found
    ]
    return placement_among(slot, gpus, address, root)


def placement_among(
    slot: int, gpus: Sequence[str], address: str, root: Path = SYSFS
) -> DevicePlacement:
    """The placement of GPU `slot` of a node. gpus: the PCI addresses of the node's GPUs; may be empty."""
    host = socket.gethostname()
    gpu = gpus[slot] if gpus else ""
    nics = nearest_nics(gpus, root, os.environ.get("NCCL_IB_HCA", ""))
    if gpu not in nics:
        return DevicePlacement(host, address, gpu, "")
    card = _Place.of(root / "class/infiniband" / nics[gpu] / "device")
    sharers = list(nics.values()).count(nics[gpu])
    return DevicePlacement(host, address, gpu, nics[gpu], sharers, card.is_apart(_gpu(gpu, root)))


def placement_lines(placements: Sequence[DevicePlacement]) -> list[str]:
    """A line for each node, in the order of its first rank. placements: by rank."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for rank, placed in enumerate(placements):
        words = (str(rank), placed.gpu, placed.nic and f"through {placed.nic}")
        ranks.setdefault((placed.host, placed.address), []).append(" ".join(filter(None, words)))
    return [
        f"{host} ({address}): ranks {', '.join(listed)}"
        for (host, address), listed in ranks.items()
    ]


def placement_errors(placements: Sequence[DevicePlacement]) -> list[UserError]:
    """What slows a node's network down: GPUs that share a card, and cards on the other socket. placements: by rank."""
    shared: dict[tuple[str, str], list[str]] = {}
    found = []
    for rank, placed in enumerate(placements):
        if placed.sharers > 1:
            shared.setdefault((placed.host, placed.nic), []).append(str(rank))
        if placed.crosses:
            path = f"rank {rank}'s GPU {placed.gpu} sends through {placed.nic}"
            problem = f"on {placed.host} {path}, which is on the other socket"
            hint = "name the cards of GPUs in NCCL_IB_HCA, or mend the node's cards"
            found.append(UserError("placement", problem, hint))
    for (host, nic), ranks in shared.items():
        problem = f"on {host} ranks {', '.join(ranks)} share the network card {nic}"
        hint = (
            "book nodes with a card for each GPU, or set the share of a card in placement.hardware"
        )
        found.append(UserError("placement", problem, hint))
    return found


def _cards(root: Path, wanted: str) -> list[str]:
    """Names of the RDMA cards with an active port, sorted by number (mlx5_2 before mlx5_10)."""
    folder = root / "class/infiniband"
    up = {
        state.parents[2].name
        for state in folder.glob("*/ports/*/state")
        if "ACTIVE" in state.read_text()
    }
    return sorted(
        (name for name in up if _is_wanted(name, wanted)), key=lambda name: (len(name), name)
    )


def _is_wanted(name: str, wanted: str) -> bool:
    """NCCL_IB_HCA: comma-separated prefixes of names; "^" excludes what matches, "=" takes the names as exact."""
    negates = wanted.startswith("^")
    listed = wanted.removeprefix("^")
    exact = listed.startswith("=")
    asked = [card.partition(":")[0] for card in listed.removeprefix("=").split(",") if card]
    if not asked:
        return True
    return any(name == card if exact else name.startswith(card) for card in asked) != negates


def _gpu(address: str, root: Path) -> _Place:
    return _Place.of(root / "bus/pci/devices" / address)


def bundles_by_address(addresses: Mapping[int, str]) -> list[int]:
    """Bundle numbers sorted by the IPv4 addresses of their nodes. Raises UserError where Ray knows a node by a name."""
    try:
        return sorted(addresses, key=lambda bundle: ipaddress.IPv4Address(addresses[bundle]))
    except ipaddress.AddressValueError as error:
        hint = "start Ray with the node's address: ray start --node-ip-address=10.0.0.2"
        raise UserError(
            "placement.network", f"Ray has no IPv4 address for a node ({error})", hint
        ) from None
