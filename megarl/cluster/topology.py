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
from itertools import product
from pathlib import Path

import torch

from megarl import device
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

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


def nearest_nics(gpus: Sequence[str], root: Path = SYSFS, hca_filter: str = "") -> dict[str, str]:
    """The RDMA card of each GPU of a node, among the cards whose link is up; {} without such a card.

    gpus: PCI addresses ("0000:18:00.0"). hca_filter: in the syntax of NCCL_IB_HCA. No card serves more GPUs than
    gpus / cards, rounded up. Pairing the nearest first is optimal: all devices below a bridge are equally near to any
    device elsewhere.
    """
    cards = {name: _card(name, root) for name in _cards(root, hca_filter)}
    places = {gpu: _gpu(gpu, root) for gpu in gpus}
    pairs = list(product(gpus, cards))
    # stable: ties as they come
    pairs.sort(key=lambda pair: places[pair[0]].nearness(cards[pair[1]]), reverse=True)
    nics: dict[str, str] = {}
    load: Counter[str] = Counter()
    for gpu, name in pairs:
        if gpu not in nics and load[name] < math.ceil(len(gpus) / len(cards)):
            nics[gpu] = name
            load[name] += 1
    return nics


def own_placement(slot: int, address: str) -> DevicePlacement:
    """The placement of the calling process, which uses GPU `slot` of its node and sees all of the node's GPUs."""
    gpus = []
    if device.DEVICE == "cuda":
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    return placement_among(slot, gpus, address)


def placement_among(
    slot: int, gpus: Sequence[str], address: str, root: Path = SYSFS
) -> DevicePlacement:
    """The placement of GPU `slot` of a node. gpus: the PCI addresses of the node's GPUs; may be empty."""
    host = socket.gethostname()
    gpu = gpus[slot] if gpus else ""
    nics = nearest_nics(gpus, root, os.environ.get("NCCL_IB_HCA", ""))
    if gpu not in nics:
        return DevicePlacement(host, address, gpu, "")
    nic = nics[gpu]
    crosses = _card(nic, root).is_apart(_gpu(gpu, root))
    return DevicePlacement(host, address, gpu, nic, list(nics.values()).count(nic), crosses)


def placement_lines(placements: Sequence[DevicePlacement]) -> list[str]:
    """A line for each node, in the order of its first rank. placements: by rank."""
    ranks: dict[str, list[str]] = {}
    for rank, placed in enumerate(placements):
        words = f"{rank} {placed.gpu}".strip()
        if placed.nic:
            words += f" through {placed.nic}"
        ranks.setdefault(f"{placed.host} ({placed.address})", []).append(words)
    return [f"{node}: ranks {', '.join(listed)}" for node, listed in ranks.items()]


@listed
def placement_errors(placements: Sequence[DevicePlacement]) -> ErrorIterator:
    """What slows a node's network down: GPUs that share a card, and cards on the other socket. placements: by rank."""
    shared: dict[tuple[str, str], list[str]] = {}
    for rank, placed in enumerate(placements):
        if placed.sharers > 1:
            shared.setdefault((placed.host, placed.nic), []).append(str(rank))
        if placed.crosses:
            path = f"rank {rank}'s GPU {placed.gpu} sends through {placed.nic}"
            problem = f"on {placed.host} {path}, which is on the other socket"
            hint = "name the cards of GPUs in NCCL_IB_HCA, or mend the node's cards"
            yield UserError("placement", problem, hint)
    for (host, nic), ranks in shared.items():
        problem = f"on {host} ranks {', '.join(ranks)} share the network card {nic}"
        hint = (
            "book nodes with a card for each GPU, or set the share of a card in placement.hardware"
        )
        yield UserError("placement", problem, hint)


def _cards(root: Path, hca_filter: str) -> list[str]:
    """Names of the RDMA cards with an active port, sorted by number (mlx5_2 before mlx5_10)."""
    names = set()
    for state in root.glob("class/infiniband/*/ports/*/state"):
        name = state.parents[2].name
        if "ACTIVE" in state.read_text() and _is_wanted(name, hca_filter):
            names.add(name)
    return sorted(names, key=lambda name: (len(name), name))


def _is_wanted(name: str, hca_filter: str) -> bool:
    """NCCL_IB_HCA: comma-separated prefixes of names; "^" excludes what matches, "=" takes the names as exact."""
    names = [card.partition(":")[0] for card in hca_filter.lstrip("^=").split(",") if card]
    if not names:
        return True
    if hca_filter.startswith(("=", "^=")):
        is_named = name in names
    else:
        is_named = name.startswith(tuple(names))
    return is_named != hca_filter.startswith("^")


def _card(name: str, root: Path) -> _Place:
    return _Place.of(root / "class/infiniband" / name / "device")


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
