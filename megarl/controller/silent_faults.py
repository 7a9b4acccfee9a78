"""Silent faults of a step: who, where and when, and whether the recipe wants the step repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.controller.run import Run, Step, TrainingRun
from megarl.tracking.metrics import age_metrics
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


def compare_logprobs(run: Run, step: Step) -> None:
    """Record how far the engines' log-probabilities are from the trainer's in the rows that the step has trained on.

    Raises SilentFault for an engine out of its band.
    """
    if step.collected is None or step.trained is None:
        return
    rows = run.fleet.trainers.row_diffs()
    version = run.fleet.version
    step.record.add(age_metrics(rows.by_age(version)))
    step.record.tokens(rows.shown)
    if len(run.fleet.engines.processes.engines) > 1:
        step.record.add(run.engine_watch.look(step.groups.summaries, rows, version))
