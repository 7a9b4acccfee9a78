"""From a recipe to the command that it was given to: notes and checks first, then the imports that take long."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.collector import collector_paused
from megarl.config import Recipe
from megarl.printable import show
from megarl.types import UserError


def tell(line: object) -> None:
    """Print a line on stderr, as megarl's own."""
    show(f"megarl: {line}", sys.stderr)


def advise(recipe: Recipe) -> None:
    """Print on stderr which keys nothing reads and which values are probably not meant; the command continues."""
    from megarl.preflight.notes import recipe_notes

    for line in recipe_notes(recipe):
        tell(line)


def train(recipe: Recipe, *, resume: bool) -> None:
    """Run a recipe, from its newest good checkpoint with `resume`."""
    advise(recipe)
    from megarl.preflight.checks_by_command import check

    inputs = check(recipe)

    from megarl.cluster.failures import WorkerFailed
    from megarl.controller.loop import train as train_recipe
    from megarl.controller.resuming import find
    from megarl.diagnosis.memory import kernel_kills
    from megarl.tracking.run_log import RunLog

    start = find(recipe, inputs.prompts, show) if resume else None
    if start and start.step >= recipe.run.steps:
        show(f"{start.folder} is the end of the run: run.steps is {recipe.run.steps}")
        return
    step = start.step if start else -1
    with RunLog(recipe, resume=resume, step=step, can_drain=True) as log:
        for note in inputs.notes:
            log.say(note)
        kills_before = kernel_kills()
        try:
            train_recipe(recipe, inputs, log, start)
        except WorkerFailed as failed:
            from megarl.commands.memory_report import with_memory_report

            raise with_memory_report(
                recipe, failed, log.phases.failed, kernel_kills() - kills_before
            ) from None


def dry_run(recipe: Recipe, *, other: str | None) -> None:
    """Check a recipe; other: a given option that excludes --dry-run. Raises UserError."""
    if other:
        raise UserError(
            "--dry-run", f"nothing is launched, and {other} says how", "leave one of them out"
        )
    with collector_paused():  # modules and prompts are no garbage
        advise(recipe)
        from megarl.commands import dry_run as dry_run_command

        dry_run_command.dry_run(recipe, show)


def train_from(recipe: Recipe, *, samples: Path, resume: bool) -> None:
    """Train on a file of samples, without engines. Raises UserError."""
    if resume:
        raise UserError(
            "--resume",
            "training on a file begins with the weights of model.path",
            "leave one of them out",
        )
    advise(recipe)
    from megarl.preflight.checks_by_command import check_samples

    file = check_samples(recipe, samples)

    from megarl.commands import sample_files
    from megarl.tracking.run_log import RunLog

    with RunLog(recipe) as log:
        sample_files.train_from(recipe, file, log)


def rollout(recipe: Recipe, *, out: Path) -> None:
    """Write a recipe's samples into a file, without training."""
    advise(recipe)
    from megarl.preflight.checks_by_command import check_rollout

    inputs = check_rollout(recipe, out)

    from megarl.commands.sample_files import roll_out
    from megarl.tracking.run_log import RunLog

    with RunLog(recipe) as log:
        for note in inputs.notes:
            log.say(note)
        roll_out(recipe, inputs, log, out)
