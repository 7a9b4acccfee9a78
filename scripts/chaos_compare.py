"""Whether a run of chaos.py that was hit has ended as the same run that nobody has hit."""

from __future__ import annotations

import json
from pathlib import Path

import soak_resume as soak
from chaos_runs import RUNS

UNDISTURBED = "undisturbed"  # the name of that run
# what engines measure otherwise, and what faults cost
_OF_WORKERS = ("workers_replaced", "retries", "calls_lost", "breaker_open_s")
MEASURED = (
    *soak.OF_ENGINES,
    "recovery/",
    *(f"{room}/{name}" for room in ("reward", "episode") for name in _OF_WORKERS),
)


def differences(folder: Path, name: str) -> list[str]:
    """What is not the same; folder: of a kind of run, by whose name it is called.

    Where samples are drawn anew each time, it is only whether every step was recorded once, and the last one saved.
    """
    kind = RUNS[folder.name]
    try:
        if not kind.is_seeded:
            return _missing(folder, name)
        unequal = soak.differences(folder, UNDISTURBED, name, MEASURED, episodes=kind.episodes)
        if "run.json" in unequal and _is_same_state(folder, name):
            unequal.remove("run.json")
        return unequal
    except (ValueError, FileNotFoundError) as error:
        return [f"records: {error}"]


def _missing(folder: Path, name: str) -> list[str]:
    steps = [
        [record["step"] for record in soak.records(folder, run)] for run in (UNDISTURBED, name)
    ]
    last = folder / "runs" / name / "checkpoints" / f"step-{soak.STEPS:06d}" / "manifest.json"
    missing = [] if last.exists() else ["the last checkpoint"]
    return missing if steps[0] == steps[1] else [*missing, f"the steps are {steps[1]}"]


def _is_same_state(folder: Path, name: str) -> bool:
    """Whether what the last checkpoint says of the run is the same, but for how many exchanges were tried."""
    states = []
    for run in (UNDISTURBED, name):
        file = folder / "runs" / run / "checkpoints" / f"step-{soak.STEPS:06d}" / "run.json"
        states.append(json.loads(file.read_text()) | {"attempts": 0})
    return states[0] == states[1]
