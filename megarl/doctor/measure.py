"""`--measure`: starts a rank on every GPU, measures all of them at once, and finds ranks that are slower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address
from statistics import median

from megarl import device
from megarl.cluster.session import Cluster, WorkerFailed
from megarl.doctor.facts import NodeFacts, RankRates
from megarl.doctor.findings import Finding, of_faults
from megarl.types import UserFault

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


def measure(nodes: Sequence[NodeFacts], say: Callable[[str], None]) -> tuple[list[RankRates], list[Finding]]:
    """(rates of all ranks, in the order of their nodes' addresses; findings).

    Measures the nodes of the Ray cluster with the most common number of GPUs; without a cluster this machine.
    """
    joins = nodes[0].ray_gpus is not None
    if joins:
        counts = Counter(node.ray_gpus for node in nodes if node.ray_gpus)
        if not counts:
            mend = "start Ray with --num-gpus, on a machine without GPUs too"
            return [], [Finding("fault", "--measure", "Ray counts no GPU on any node", mend)]
        ((per_node, count),) = counts.most_common(1)
    else:
        per_node, count = len(nodes[0].gpus) or SIMULATED, 1
    try:
        rates = _run(per_node * count, per_node, joins, say)
    except UserFault as fault:
        return [], of_faults([fault])
    except WorkerFailed as error:
        mend = "look at the lines above, then at NCCL's log (NCCL_DEBUG=INFO): a run would end there too"
        return [], [Finding("fault", "--measure", f"it failed ({error})", mend)]
    addresses = [node.address for node in nodes if not joins or node.ray_gpus == per_node]
    return rates, laggards(rates, sorted(addresses, key=IPv4Address))


def _run(num_ranks: int, per_node: int, joins: bool, say: Callable[[str], None]) -> list[RankRates]:
    with Cluster(num_ranks, per_node if joins else None, _TIMEOUT_S, say) as cluster:
        store = device.host_store(_TIMEOUT_S, cluster.host)
        workers = [cluster.worker(f"measuring rank {rank}", rank) for rank in range(num_ranks)]
        arguments = (num_ranks, per_node, device.address_of(store), _TIMEOUT_S)
        calls = {worker.start(_RANK, rank, *arguments): worker.name for rank, worker in enumerate(workers)}
        cluster.gather(calls)
        rates = cluster.call_all(workers, "measure")
        cluster.call_all(workers, "close")
        return rates


def laggards(rates: Sequence[RankRates], addresses: Sequence[str]) -> list[Finding]:
    """Findings for ranks that are much slower than the median. addresses: by node."""
    found = []
    for name, what in _WHAT.items():
        values = [getattr(measured, name) for measured in rates]
        if None in values or len(values) < 3:  # two values do not tell which is slow
            continue
        usual, per_node = median(values), len(rates) // max(1, len({measured.node for measured in rates}))
        for rank, (measured, value) in enumerate(zip(rates, values, strict=True)):
            if value < _SLOW * usual:
                problem = f"{what} at {value / usual:.0%} of the median GPU's rate"
                mend = "look at its clocks and links, or leave the node out: all ranks wait for it"
                where = (addresses[measured.node],) if measured.node < len(addresses) else ()
                found.append(Finding("warning", f"GPU {rank % per_node}", problem, mend, where))
    return found
