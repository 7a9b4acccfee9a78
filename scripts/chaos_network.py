"""The Ray nodes of chaos.py, in a network that can be cut: namespaces behind a bridge of this machine; needs root."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
from chaos_faults import Fault, hit

if TYPE_CHECKING:
    from tests.ray_nodes import RayNodes

NUM_NODES = 3
SHORT_S = 5.0  # for which a short fault cuts the network

_FORWARDING = 3  # states of a bridge's port
_DISABLED = 0


class Network:
    """The first address is this machine's own on the bridge, each further one that of a namespace. Used by `with`.

    All know each other's link address for good: where the network is cut packets vanish, and nobody hears of it.
    """

    def __init__(self, num_addresses: int) -> None:
        subnet = _free_subnet()
        self.addresses = [f"{subnet}.{number + 1}" for number in range(num_addresses)]
        self._bridge = f"mc{os.getpid()}"
        self._ports = {
            address: f"{self._bridge}-{number}"
            for number, address in enumerate(self.addresses)
            if number
        }

    @property
    def namespaces(self) -> dict[str, str]:
        """By address the file of its namespace."""
        return {address: f"/run/netns/{port}" for address, port in self._ports.items()}

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        head, *others = self.addresses
        links = {address: f"02:00:00:00:00:{n:02x}" for n, address in enumerate(self.addresses)}
        _ip(f"link add {self._bridge} address {links[head]} type bridge")
        _ip(f"addr add {head}/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        for address in others:
            port = self._ports[address]
            _ip(f"netns add {port}")
            _ip(f"link add {port} type veth peer name eth0 address {links[address]} netns {port}")
            _ip(f"link set {port} master {self._bridge} up")
            _ip(f"neigh add {address} lladdr {links[address]} dev {self._bridge} nud permanent")
            _ip("link set lo up", namespace=port)
            _ip("link set eth0 up", namespace=port)
            _ip(f"addr add {address}/24 dev eth0", namespace=port)
            for other in self.addresses:
                if other != address:
                    _ip(f"neigh add {other} lladdr {links[other]} dev eth0 nud permanent", port)

    def __exit__(self, *_: object) -> None:
        for port in self._ports.values():
            _ip(f"link delete {port}", must_work=False)
            _ip(f"netns delete {port}", must_work=False)
        _ip(f"link delete {self._bridge}", must_work=False)

    def cut(self, address: str) -> None:
        """Drop every packet from and to an address."""
        self._set_state(address, _DISABLED)

    def heal(self, address: str) -> None:
        self._set_state(address, _FORWARDING)

    def _set_state(self, address: str, state: int) -> None:
        _run(["bridge", "link", "set", "dev", self._ports[address], "state", str(state)])


def _free_subnet() -> str:
    """The beginning of addresses, of those that are kept for measurements, of which this machine has none."""
    used = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    subnets = (f"198.18.{number}" for number in range(256))
    return next(
        subnet
        for subnet in subnets
        if not any(address.startswith(f"{subnet}.") for address in used)
    )


def _ip(words: str, namespace: str = "", *, must_work: bool = True) -> None:
    within = ["-n", namespace] if namespace else []
    _run(["ip", *within, *words.split()], must_work=must_work)


def _run(command: Sequence[str], *, must_work: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if must_work and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} (it needs root)")


class Nodes:
    """Three Ray nodes of a slot each on this machine, of which a run has two, and one more to spare."""

    def __init__(self, nodes: RayNodes, network: Network) -> None:
        self._nodes = nodes
        self._network = network
        self._hit = ""
        self._healing: threading.Timer | None = None

    @property
    def folder(self) -> str:
        """Of the nodes' own files, by which their processes are known."""
        return str(self._nodes.disk)

    def _second(self, pids: Mapping[str, int]) -> tuple[str, int]:
        """The address of the node that the second rank is on, and its raylet.

        Raises ValueError or psutil.NoSuchProcess where there is no such rank.
        """
        rank = psutil.Process(pids.get("training rank 1", 0))
        (raylet,) = [process for process in rank.parents() if process.name() == "raylet"]
        return self._nodes.address_of(raylet), raylet.pid

    def strike(self, fault: Fault, pids: Mapping[str, int]) -> None:
        """Hit the second node, its network, or its raylet alone. Raises as `_second`."""
        self._hit, raylet = self._second(pids)
        if fault.kind in ("network", "short network"):
            self._network.cut(self._hit)
        elif fault.role == "second node":
            self._nodes.kill(self._hit)
        else:
            hit(fault.kind, raylet)
        if fault.kind == "short network":
            self._healing = threading.Timer(SHORT_S, self._network.heal, [self._hit])
            self._healing.start()

    def renew(self, pids: Mapping[str, int]) -> None:
        """Start the node that was hit anew, from now on as the spare one, unless the run has kept it."""
        if self._healing:
            self._healing.join()
            self._healing = None
            if self._is_in_use(pids):
                return
        self._network.heal(self._hit)
        if self._hit in self._nodes.addresses:
            self._nodes.kill(self._hit)
        self._nodes.join(self._hit)
        self._nodes.wait_for(NUM_NODES)

    def _is_in_use(self, pids: Mapping[str, int]) -> bool:
        try:
            return self._second(pids)[0] == self._hit
        except (ValueError, psutil.NoSuchProcess):
            return False


@contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    """Nodes, which commands that are started meanwhile join."""
    from tests.ray_nodes import RayNodes

    before = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(prefix="n-", dir="/tmp") as disk,
        Network(NUM_NODES) as network,
        RayNodes(folder, Path(disk), gpus=1, namespaces=network.namespaces) as nodes,
    ):
        nodes.start(*network.addresses)
        os.environ.update(nodes.environment() | {"RAY_ADDRESS": nodes.address})
        try:
            yield Nodes(nodes, network)
        finally:
            os.environ.clear()
            os.environ.update(before)
