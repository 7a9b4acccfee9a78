"""Silent faults of a step: who, where and when, and whether the recipe wants the step repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.controller.run import Run, Step, TrainingRun
from megarl.types import SilentFault


@contextmanager
def step_of_faults(run: TrainingRun, step: int) -> Iterator[None]:
    """Raise the silent faults of the block with the step's number and the recipe's decision (run.on_silent_fault)."""
    try:
        yield
    except SilentFault as fault:
        if fault.kind == "engine" and isinstance(run, Run):
            fault = run.fleet.engines.located(fault)
        may_repeat = run.recipe.run.on_silent_fault == "repeat"
        raise fault.in_step(step, may_repeat=may_repeat) from None


def compare_engines(run: Run, step: Step) -> None:
    """Compare the engines by the rows that the step has trained on. Raises SilentFault for one out of its band."""
    is_sampled = step.collected is not None and step.trained is not None
    if not is_sampled or len(run.fleet.engines.processes.engines) < 2:
        return
    rows = run.fleet.trainers.row_diffs()
    groups = step.groups.summaries
    step.record.add(run.engine_watch.look(groups, rows, run.fleet.version))
