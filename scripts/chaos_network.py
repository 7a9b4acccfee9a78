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
# for how long a short fault cuts the network, by its share: from what nobody notices to more than the deadlines
_SHORTEST_S, _LONGEST_S = 2.0, 20.0

# in the command lines of processes that a node has for a run, and not for Ray
_OF_RUN = ("_Shell", "forkserver", "megarl.")
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
        self._hit = ""  # until it is renewed
        self._log: Path
        self._log_bytes = 0
        self._healing: threading.Timer | None = None

    def has_for_run(self, process: psutil.Process) -> bool:
        """Whether a process is a run's and not Ray's, on a node that a run can reach: not on one that was hit."""
        if process.environ().get("MEGARL_RAY_DIR") != str(self._nodes.disk):
            return False
        try:
            is_out_of_reach = self._nodes.address_of(process) == self._hit
        except ValueError:
            is_out_of_reach = False
        return not is_out_of_reach and any(word in " ".join(process.cmdline()) for word in _OF_RUN)

    def _second(self, pids: Mapping[str, int]) -> tuple[str, int]:
        """The address of the node that the second rank is on, and its raylet.

        Raises ValueError or psutil.NoSuchProcess where there is no such rank.
        """
        rank = psutil.Process(pids.get("training rank 1", 0))
        (raylet,) = [process for process in rank.parents() if process.name() == "raylet"]
        return self._nodes.address_of(raylet), raylet.pid

    def strike(self, fault: Fault, pids: Mapping[str, int], log: Path) -> None:
        """Hit the second node, its network, or its raylet alone. Raises as `_second`. log: of the run."""
        self._hit, raylet = self._second(pids)
        self._log = log
        self._log_bytes = log.stat().st_size
        if fault.kind in ("network", "short network"):
            self._network.cut(self._hit)
        elif fault.role == "second node":
            self._nodes.kill(self._hit)
        else:
            hit(fault.kind, raylet)
        if fault.kind == "short network":
            cut_s = _SHORTEST_S + fault.share * (_LONGEST_S - _SHORTEST_S)
            self._healing = threading.Timer(cut_s, self._network.heal, [self._hit])
            self._healing.start()

    def renew(self, *, has_resumed: bool) -> None:
        """Start the node that was hit anew, from now on as the spare one, unless the run goes on with it.

        has_resumed: whether the run has ended, and begun again with the nodes that were there.
        """
        if self._healing:
            self._healing.join()
            self._healing = None
            is_spent = self._was_replaced() and not has_resumed
            if not (is_spent or self._nodes.has_ended(self._hit)):
                self._hit = ""
                return
        self._network.heal(self._hit)
        if self._hit in self._nodes.addresses:
            self._nodes.kill(self._hit)
        self._nodes.join(self._hit)
        self._nodes.wait_for(NUM_NODES)
        self._hit = ""

    def _was_replaced(self) -> bool:
        """Whether the run has put the slots of the node that was hit on the spare one."""
        with self._log.open("rb") as log:
            log.seek(self._log_bytes)
            return f"node {self._hit} has died: its slots are" in log.read().decode(
                errors="replace"
            )


@contextmanager
def ray_nodes(folder: Path, inline_bytes: int = 1000) -> Iterator[Nodes]:
    """Nodes, which commands that are started meanwhile join. inline_bytes: as of `RayNodes`."""
    from tests.ray_nodes import RayNodes

    before = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(prefix="n-", dir="/tmp") as disk,
        Network(NUM_NODES) as network,
        RayNodes(folder, Path(disk), 1, network.namespaces, inline_bytes=inline_bytes) as nodes,
    ):
        nodes.start(*network.addresses)
        os.environ.update(nodes.environment() | {"RAY_ADDRESS": nodes.address})
        try:
            yield Nodes(nodes, network)
        finally:
            os.environ.clear()
            os.environ.update(before)
