"""Seconds that a run loses when an engine, a training rank, a node or the whole run dies, beside each other in one run.

    python scripts/bench/recovery.py [--times 3] [--folder DIR]

A tiny model, on CPU: what is lost is the start of processes, not the work. The run has a rank and an engine on each of
two Ray nodes of this machine, and a spare node; needs root (chaos_network.py). Each fault comes in a step of its own,
in the middle of its rollout or its updates; lost is the time from the fault to the step's record beyond what is usual.
The whole run is killed with all of its processes and resumed from its newest checkpoint, while its Ray nodes go on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import chaos
import chaos_runs
import soak_resume as soak
from chaos_faults import NODES
from chaos_network import ray_nodes

CASES = {
    "an engine, in its rollout": chaos.Fault("kill", "scheduler", "rollout", 0.5),
    "a training rank, in its updates": chaos.Fault("kill", "rank", "train", 0.5),
    "a node, in its updates": chaos.Fault("kill", "second node", "train", 0.5),
}
RESTART = "the whole run, resumed from its checkpoint"
RAY_INLINE_BYTES = 100 * 1024  # Ray's default: errors of workers come with the answer
USUAL_STEPS = 5  # before the first fault
STEPS = 10_000  # more than it comes to: the run is killed at the end


def lost_s(attacked: chaos.Attack, fault: chaos.Fault, usual_s: dict[str, float]) -> float:
    """Hit somebody, and wait until the step is done after all."""
    outcome = chaos.attack(attacked, fault, usual_s, random.Random(1), None)
    assert outcome.outcome == "recovered" and outcome.lost_s is not None, outcome
    if fault.role in NODES:
        assert attacked.nodes
        attacked.nodes.renew(has_resumed=False)
    return outcome.lost_s


def restart_s(attacked: chaos.Attack, step_s: float) -> float:
    """Kill the run in the middle of a step and resume it; the seconds until that step has its record."""
    before = attacked.steps
    while attacked.steps == before:
        time.sleep(0.01)
    time.sleep(step_s / 2)
    attacked.kill()
    seconds = chaos.resumed_s(attacked, before + 2)
    assert attacked.steps >= before + 2, f"it has not resumed: see {attacked.log}"
    return seconds - step_s / 2


@contextmanager
def run_on_nodes(folder: Path) -> Iterator[tuple[chaos.Attack, dict[str, float]]]:
    """A run that has begun, and the usual seconds of its phases."""
    overrides = [*chaos_runs.SMALL, *chaos_runs.ON_NODES, "checkpoint.every=1"]
    soak.prepare(folder, [*overrides, f"run.steps={STEPS}"], episodes=False)
    of_nodes = folder / "nodes"
    of_nodes.mkdir()
    with ray_nodes(of_nodes, RAY_INLINE_BYTES) as nodes:
        attacked = chaos.Attack(folder, "run", nodes)
        attacked.start()
        try:
            while attacked.steps < USUAL_STEPS:
                assert attacked.is_running, attacked.log.read_text()
                time.sleep(0.1)
            yield attacked, chaos.usual_seconds(folder, "run")
        finally:
            if attacked.is_running:
                attacked.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lost: dict[str, list[float]] = {name: [] for name in (*CASES, RESTART)}
        with run_on_nodes(folder) as (attacked, usual_s):
            for _ in range(arguments.times):
                for name, case in CASES.items():
                    lost[name].append(lost_s(attacked, case, usual_s))
                lost[RESTART].append(restart_s(attacked, usual_s["step"]))
    restarts_s = statistics.median(lost[RESTART])
    print(f"a usual step takes {usual_s['step']:.1f} s")
    print("| what dies | seconds lost, median | of a restart |")
    print("|---|---|---|")
    for name, seconds in lost.items():
        median_s = statistics.median(seconds)
        print(f"| {name} | {median_s:.1f} | {median_s / restarts_s:.0%} |")


if __name__ == "__main__":
    main()
