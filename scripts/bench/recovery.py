"""Seconds that a run loses when an engine, a training rank or the whole run dies, beside each other in one run.

    python scripts/bench/recovery.py [--times 3] [--folder DIR]

A tiny model, on CPU: what is lost is the start of processes, not the work. Each fault comes in a step of its own, in
the middle of its rollout or its updates; lost is the time from the fault to the step's record beyond what is usual. The
whole run is killed with all of its processes and resumed from its newest checkpoint, as after the death of its node.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import chaos
import chaos_runs
import soak_resume as soak

CASES = {
    "an engine, in its rollout": chaos.Fault("kill", "scheduler", "rollout", 0.5),
    "a training rank, in its updates": chaos.Fault("kill", "rank", "train", 0.5),
}
RESTART = "the whole run, resumed from its checkpoint"
STEPS_OF_FAULT = 2  # one that is hit, and one until the next


def lost_s(attacked: chaos.Attack, fault: chaos.Fault, usual_s: dict[str, float]) -> float:
    """Hit somebody, and wait until the step is done after all."""
    outcome = chaos.attack(attacked, fault, usual_s, random.Random(1), None)
    assert outcome.outcome == "recovered" and outcome.lost_s is not None, outcome
    return outcome.lost_s


def restart_s(attacked: chaos.Attack, step_s: float) -> float:
    """Kill the run in the middle of a step and resume it; the seconds until that step has its record."""
    before = attacked.steps
    while attacked.steps == before:
        time.sleep(0.01)
    time.sleep(step_s / 2)
    attacked.kill()
    return chaos.resumed_s(attacked, before + 2) - step_s / 2


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
        num_steps = chaos.FIRST + STEPS_OF_FAULT * arguments.times * (len(CASES) + 1)
        overrides = [*chaos_runs.SMALL, f"run.steps={num_steps}", "checkpoint.every=1"]
        soak.prepare(folder, overrides, episodes=False)
        soak.finish(folder, "undisturbed")
        usual_s = chaos.usual_seconds(folder, "undisturbed")
        attacked = chaos.Attack(folder, "disturbed")
        attacked.start()
        lost: dict[str, list[float]] = {name: [] for name in (*CASES, RESTART)}
        for _ in range(arguments.times):
            for name, case in CASES.items():
                lost[name].append(lost_s(attacked, case, usual_s))
            lost[RESTART].append(restart_s(attacked, usual_s["step"]))
        attacked.process.wait()
    restarts_s = statistics.median(lost[RESTART])
    print(f"a usual step takes {usual_s['step']:.1f} s")
    print("| what dies | seconds lost, median | of a restart |")
    print("|---|---|---|")
    for name, seconds in lost.items():
        median_s = statistics.median(seconds)
        print(f"| {name} | {median_s:.1f} | {median_s / restarts_s:.0%} |")


if __name__ == "__main__":
    main()
