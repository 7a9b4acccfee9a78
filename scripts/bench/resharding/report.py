"""What was measured, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any

from megarl.model.tensors import tensors
from megarl.resharding.traffic import Traffic

from .case import Case, num_bytes
from .compare import Figures

MB = 1e6


def _mean(numbers: Iterable[int]) -> int:
    return round(mean(map(int, numbers)))


def as_json(
    target: str, case: Case, figures: Mapping[str, Figures], minimum: Traffic
) -> dict[str, Any]:
    """The object that --json prints. Bytes per rank are what a rank receives, in the mean over the ranks."""
    return {
        "target": target,
        "model_bytes": num_bytes(tensors(case.shape)),
        "minimum_wire_bytes_per_rank": _mean(minimum.minimum_wire),
        "methods": {
            name: {
                "wire_bytes_per_rank": _mean(costs.wire_bytes()),
                "inter_node_bytes_per_rank": _mean(costs.inter_node_bytes(case)),
                "median_s": median(costs.seconds),
                "extra_memory_bytes": max(costs.memory),
                "plan_s": costs.plan_s,
                "exact": costs.exact,
            }
            for name, costs in figures.items()
        },
    }


def show(
    target: str, case: Case, figures: Mapping[str, Figures], minimum: Traffic, own_namespace: bool
) -> list[str]:
    """The same for people, with the spread and the cross-checks."""
    summary, least = as_json(target, case, figures, minimum), max(1, _mean(minimum.minimum_wire))
    least_fabric = sum(minimum.minimum_fabric) / case.num_processes
    lines = [
        f"target {target}: {case.num_processes} processes on {case.num_processes // case.gpus_per_node} nodes, "
        f"model {summary['model_bytes'] / MB:.0f} MB, training TP{case.train.tp} PP{case.train.pp} EP{case.train.ep} "
        f"-> {case.engine.count} engines TP{case.engine.tp} EP{case.engine.ep}",
        f"least bytes a rank can receive: {least / MB:.2f} MB mean, {max(minimum.minimum_wire) / MB:.2f} max; "
        f"least between nodes: {least_fabric / MB:.2f} MB mean",
        "method          wire MB (max)   / least  between nodes  seconds (min - max)      x megarl  extra MB"
        "  plan s  exact",
    ]
    for name, costs in figures.items():
        row, slowest = summary["methods"][name], max(costs.seconds)
        lines.append(
            f"{name:14} {row['wire_bytes_per_rank'] / MB:8.2f} ({max(costs.wire_bytes()) / MB:6.2f}) "
            f"{row['wire_bytes_per_rank'] / least:6.3f}  {row['inter_node_bytes_per_rank'] / MB:13.2f}  "
            f"{row['median_s']:7.3f} ({min(costs.seconds):.3f} - {slowest:.3f})  "
            f"{row['median_s'] / summary['methods']['megarl']['median_s']:8.2f}  "
            f"{row['extra_memory_bytes'] / MB:8.1f}  {row['plan_s']:6.3f}  {row['exact']}"
        )
    for name, costs in figures.items() if own_namespace else ():
        total = sum(costs.wire_bytes())
        lines.append(
            f"loopback of {name}: {costs.loopback_bytes / MB:.1f} MB with headers, sockets {total / MB:.1f} MB "
            f"({costs.loopback_bytes / total:.4f} x), control {costs.control_bytes / MB:.3f} MB"
        )
    return lines


def bounds(figures: Mapping[str, Figures], megabits: int) -> list[str]:
    """The time that the throttled loopback alone needs for each method's bytes, beside the time that it took."""
    lines = []
    for name, costs in figures.items():
        bound = sum(costs.wire_bytes()) * 8 / (megabits * 1e6)
        lines.append(
            f"{name:14} at {megabits} Mbit/s: link's bound {bound:.3f} s, took {median(costs.seconds):.3f} s "
            f"({median(costs.seconds) / bound:.2f} x)"
        )
    return lines
