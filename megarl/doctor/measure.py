"""`--measure`: starts a rank on every GPU, measures all of them at once, finds slower ranks, writes a hardware file.

The file is for `megarl plan --hardware`, and is completed from the card's own file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from statistics import median

from megarl import device
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.config.hardware import FOLDER, Hardware, load_hardware
from megarl.doctor.facts import NodeFacts, RankRates
from megarl.doctor.findings import Finding, of_errors
from megarl.printable import Say
from megarl.types import UserError

SIMULATED = 2  # ranks on a machine without GPUs
_RANK = "megarl.doctor.rates:RateRank"
_TIMEOUT_S = 300.0
_SLOW = 0.8  # of the median; all ranks of a run would wait for a slower one
_WHAT = {
    "matmul_flops": "matrix products",
    "copy_bytes_per_s": "copies in its memory",
    "host_bytes_per_s": "copies from the host",
    "inside_bytes_per_s": "messages inside the node",
    "between_bytes_per_s": "messages between nodes",
}
_ASSUMED = {  # without a measurement and without a file of the card
    "compute_share": 0.6,
    "prefill_share": 0.45,
    "hbm_share": 0.7,
    "nvlink_share": 0.8,
    "nic_share": 0.9,
    "nvlink_latency_s": 15e-6,
    "nic_latency_s": 40e-6,
    "disk_bytes_per_s": 1e9,
}

_LEAST_S = 1e-9  # the lower bound of latencies in the file
_Line = tuple[float | int | str, str]  # a key's value, where it comes from


def measure(nodes: Sequence[NodeFacts], say: Say) -> tuple[list[RankRates], list[Finding]]:
    """(rates of all ranks, in the order of their nodes' addresses; findings).

    Measures the nodes of the Ray cluster with the most common number of GPUs; without a cluster this machine.
    """
    joins = nodes[0].ray_gpus is not None
    if joins:
        counts = Counter(node.ray_gpus for node in nodes if node.ray_gpus)
        if not counts:
            return [], [
                Finding(
                    "error",
                    "--measure",
                    "Ray counts no GPU on any node",
                    "start Ray with --num-gpus, on a machine without GPUs too",
                )
            ]
        ((per_node, count),) = counts.most_common(1)
    else:
        per_node = len(nodes[0].gpus) or SIMULATED
        count = 1
    try:
        rates = _run(per_node * count, per_node, joins, say)
    except UserError as error:
        return [], of_errors([error])
    except WorkerFailed as raised:
        return [], [
            Finding(
                "error",
                "--measure",
                f"it failed ({raised})",
                "look at the lines above, then at NCCL's log (NCCL_DEBUG=INFO): a run would end there too",
            )
        ]
    addresses = [node.address for node in nodes if not joins or node.ray_gpus == per_node]
    return rates, laggards(rates, sorted(addresses, key=IPv4Address))


def _run(num_ranks: int, per_node: int, joins: bool, say: Say) -> list[RankRates]:
    with Cluster(num_ranks, per_node if joins else None, _TIMEOUT_S, say) as cluster:
        store = device.host_store(_TIMEOUT_S, cluster.host)
        workers = [cluster.worker(f"measuring rank {rank}", rank) for rank in range(num_ranks)]
        arguments = (num_ranks, per_node, device.address_of(store), _TIMEOUT_S)
        calls = {
            worker.start(_RANK, rank, *arguments): worker.name
            for rank, worker in enumerate(workers)
        }
        cluster.gather(calls)
        rates = cluster.call_all(workers, "measure")
        cluster.call_all(workers, "close")
        return rates


def laggards(rates: Sequence[RankRates], addresses: Sequence[str]) -> list[Finding]:
    """Findings for ranks that are much slower than the median. addresses: by node."""
    findings = []
    for name, what in _WHAT.items():
        values = [getattr(measured, name) for measured in rates]
        if None in values or len(values) < 3:  # two values do not tell which is slow
            continue
        usual = median(values)
        per_node = len(rates) // max(1, len({measured.node for measured in rates}))
        for rank, (measured, value) in enumerate(zip(rates, values, strict=True)):
            if value < _SLOW * usual:
                problem = f"{what} at {value / usual:.0%} of the median GPU's rate"
                hint = "look at its clocks and links, or leave the node out: all ranks wait for it"
                where = f"GPU {rank % per_node}"
                address = tuple(addresses[measured.node : measured.node + 1])
                findings.append(Finding("warning", where, problem, hint, address))
    return findings


def base_of(device_name: str, folder: Path = FOLDER) -> Hardware | None:
    """The hardware file of this card; the one with the longest name where several match."""
    cards = [load_hardware(path) for path in sorted(folder.glob("*.yaml"))]
    named = [card for card in cards if card.is_card(device_name)]
    return max(named, key=lambda card: len(card.name), default=None)


def hardware_text(
    rates: Sequence[RankRates], nodes: Sequence[NodeFacts], base: Hardware | None
) -> str:
    """The text of the file. Raises ValueError without measurements.

    Links have their measured speed and a share of 1. The peaks of products and copies, and the shares that a run
    reaches, come from the card's file; a share is lowered to the measured one where that is less. Without a card's
    file the peaks are the measured rates.
    """
    card = f", completed from {base.name}'s own file" if base else ""
    num_nodes = len({rank.node for rank in rates})
    lines = [f"# Measured by megarl doctor --measure on {num_nodes} node(s){card}."]
    for key, (value, source) in _lines(rates, nodes, base).items():
        if isinstance(value, float):
            written = f"{value:.6e}"  # with a dot, without which YAML 1.1 reads text
        else:
            written = json.dumps(value)  # JSON's values are YAML's, too
        lines.append(f"{key}: {written}   # {source}")
    return "\n".join([*lines, ""])


def _lines(
    rates: Sequence[RankRates], nodes: Sequence[NodeFacts], base: Hardware | None
) -> dict[str, _Line]:
    flops = min(rank.matmul_flops for rank in rates)
    copied = min(rank.copy_bytes_per_s for rank in rates)
    device = rates[0].device_name
    lines: dict[str, _Line] = {
        "name": (base.name if base else device or "CPU", "as torch names it"),
        "memory_bytes": (min(rank.memory_bytes for rank in rates), "measured: as torch reports it"),
        "bf16_flops": _peak(base, "bf16_flops", flops, "large matrix products, slowest GPU"),
        "hbm_bytes_per_s": _peak(
            base, "hbm_bytes_per_s", copied, "copies, read and written, slowest GPU"
        ),
        "compute_share": _share(base, "compute_share", flops, "bf16_flops"),
        "prefill_share": _share(base, "prefill_share", flops, "bf16_flops"),
        "hbm_share": _share(base, "hbm_share", copied, "hbm_bytes_per_s"),
        "gpus_per_node": (len(rates) // len({rank.node for rank in rates}), "counted"),
        "host_bytes": (min(node.host_bytes for node in nodes), "measured: the smallest host"),
    }
    if base and base.fp8_flops:
        lines["fp8_flops"] = base.fp8_flops, f"{base.name}'s own file"

    def slowest(name: str) -> float | None:
        return min(_values(rates, name), default=None)

    def largest(name: str) -> float | None:
        return max(_values(rates, name), default=None)

    lines |= _link(base, "nvlink", slowest("inside_bytes_per_s"), copied / 2)
    between_or_inside = float(lines["nvlink_bytes_per_s"][0])
    lines |= _link(base, "nic", slowest("between_bytes_per_s"), between_or_inside)
    speeds = [folder.write_bytes_per_s for node in nodes for folder in node.folders[:1]]
    usual = _ASSUMED | {
        "pcie_bytes_per_s": copied / 2,
        "communicator_bytes": Hardware.model_fields["communicator_bytes"].default,
    }
    small = "a small all-reduce, outside CUDA graphs"
    for key, measured, what in (
        ("pcie_bytes_per_s", slowest("host_bytes_per_s"), "copies of pinned memory"),
        ("nvlink_latency_s", largest("inside_latency_s"), small),
        ("nic_latency_s", largest("between_latency_s"), small),
        (
            "communicator_bytes",
            largest("communicator_bytes"),
            "a group's first message, largest of all GPUs",
        ),
        (
            "disk_bytes_per_s",
            min(filter(None, speeds), default=None),
            "files in the run's folder, all nodes at once",
        ),
    ):
        lines[key] = _known(base, key, measured, usual[key], what)
    return {key: lines[key] for key in Hardware.model_fields if key in lines}


def _peak(base: Hardware | None, key: str, measured: float, what: str) -> _Line:
    """The peak of the card's file, or the measured rate if that is higher."""
    if base:
        source = f"{base.name}'s own file; measured: {measured:.3g}, {what}"
        return max(getattr(base, key), measured), source
    return measured, f"measured: {what}"


def _share(base: Hardware | None, key: str, measured: float, peak: str) -> _Line:
    if not base:
        return _ASSUMED[key], "assumption, of what was measured"
    reached = measured / max(getattr(base, peak), measured)
    usual = getattr(base, key)
    if reached < usual:
        source = f"measured: {base.name}'s own file has {usual:g}, which nothing reached here"
        return round(reached, 4), source
    return usual, f"{base.name}'s own file; measured here at most {reached:.2f}"


def _link(
    base: Hardware | None, name: str, measured: float | None, otherwise: float
) -> dict[str, _Line]:
    """A link's speed and the share that large messages reach: 1 where the speed was measured with large messages."""
    speed = f"{name}_bytes_per_s"
    share = f"{name}_share"
    what = "sends and receipts at once, slowest GPU"
    if measured:
        share_line: _Line = (1.0, "the speed is what was reached")
    else:
        share_line = _known(base, share, None, _ASSUMED[share], "")
    return {speed: _known(base, speed, measured, otherwise, what), share: share_line}


def _known(
    base: Hardware | None, key: str, measured: float | None, otherwise: float, what: str
) -> _Line:
    if measured:
        return max(measured, _LEAST_S), f"measured: {what}"
    if base:
        return getattr(base, key), f"not measured: {base.name}'s own file"
    return otherwise, "assumption: there was nothing to measure"


def _values(rates: Sequence[RankRates], name: str) -> list[float]:
    values = [getattr(rank, name) for rank in rates]
    return [value for value in values if value is not None]
