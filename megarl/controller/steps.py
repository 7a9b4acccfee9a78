"""All steps of a run in order, and where it goes on when one of them cannot be completed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from megarl.checkpoints.snapshots import Snapshot
from megarl.controller.evaluation import evaluate
from megarl.controller.resuming import find, resume
from megarl.controller.run import Run
from megarl.controller.stages import reshard
from megarl.controller.warm_start import warm_start
from megarl.fleet.rank_groups import GroupBuffer
from megarl.recovery.repetition import CannotRepeat
from megarl.tracking.run_log import Record
from megarl.types import EndedEarly

# (run, number of the step, buffer of the step before) -> the buffer for the next
TakeStep = Callable[[Run, int, GroupBuffer], GroupBuffer]


@dataclass(frozen=True)
class _Between:
    """A run between two steps.

    step: the last, or that of the checkpoint that the run has resumed from; 0 before the first. buffer: for the next.
    prompts_taken, version: of the data, and of the weights that engines have. is_cold: whether the warm start is due,
    where the recipe has one. is_begun: whether the repetition of steps knows of this state.
    """

    step: int
    buffer: GroupBuffer
    prompts_taken: int
    version: int
    is_cold: bool = False
    is_begun: bool = True

    @staticmethod
    def of(run: Run, step: int, buffer: GroupBuffer) -> _Between:
        return _Between(step, buffer, run.inputs.prompts.taken, run.fleet.version)

    @staticmethod
    def entered(run: Run, start: Snapshot | None, buffer: GroupBuffer) -> _Between:
        """After `enter`."""
        between = _Between.of(run, start.step if start else 0, buffer)
        return replace(between, is_cold=start is None, is_begun=False)


def run_steps(run: Run, start: Snapshot | None, buffer: GroupBuffer, take_step: TakeStep) -> None:
    """The warm start and all steps, after `enter` has brought the run to `start`. Raises what ends the run."""
    between = _Between.entered(run, start, buffer)
    try:
        while between.step < run.recipe.run.steps:
            between = _next(run, between, take_step)
    except EndedEarly:
        run.fleet.shutdown()
        raise
    run.fleet.shutdown()


def enter(run: Run, record: Record, start: Snapshot | None) -> GroupBuffer:
    """Bring ranks with their first weights, and engines, to a checkpoint or to the start; the buffer."""
    buffer = GroupBuffer()
    if start:
        buffer = resume(start, run.recipe, run.fleet, run.inputs.prompts)
        run.saver.resumed(start)
    reshard(run.fleet, record)  # engines start empty: this gives them their first weights
    if not start and run.recipe.evaluation.at_start:
        evaluate(run, record)
    return buffer


def _next(run: Run, between: _Between, take_step: TakeStep) -> _Between:
    """After one step more, or where the run goes on after a failure."""
    try:
        return _advanced(run, between, take_step)
    except EndedEarly:
        raise
    except Exception as error:
        return _after_failure(run, between, error)


def _advanced(run: Run, between: _Between, take_step: TakeStep) -> _Between:
    if between.is_cold and run.recipe.warm_start.steps:
        warm_start(run)
        between = replace(_Between.of(run, 0, between.buffer), is_begun=False)
    if not between.is_begun:
        assert run.repetition
        run.repetition.begin(between.step)
        return replace(between, is_cold=False, is_begun=True)
    number = between.step + 1
    run.engine_count.follow(run.fleet, run.log.folder)
    return _Between.of(run, number, take_step(run, number, between.buffer))


def _after_failure(run: Run, between: _Between, error: Exception) -> _Between:
    """Go back to before the step, to a checkpoint or to the start. Raises the error if it ends the run."""
    assert run.repetition
    end_lost_time = run.repetition.lost_time()
    while True:
        with suppress(Exception):
            # a failure does not cost the checkpoint that was being written
            run.saver.rescue()
        if not isinstance(error, CannotRepeat):
            run.repetition.admit(between.step + 1, error)
        try:
            between = _gone_back(run, between)
        except Exception as again:
            error = again
        else:
            end_lost_time()
            return between


def _gone_back(run: Run, between: _Between) -> _Between:
    """Where the run goes on; ranks, engines, data and records are there."""
    assert run.repetition
    run.fleet.engines.finish_phase()
    if between.is_begun and run.repetition.go_back(between.step):
        _restore(run, between)
        return between
    start = find(run.recipe, run.inputs.prompts, run.log.say)
    if start:
        run.repetition.start_over(f"the run goes back to {start.folder}")
    else:
        run.repetition.start_over("the run begins again, because it has no checkpoint")
    run.saver.go_back(0, GroupBuffer())
    run.log.go_back(start.step if start else -1)
    run.inputs.prompts.rewind()
    run.fleet.version = -1
    with run.log.start(is_new=start is None) as record:
        record.add(run.inputs.metrics)
        buffer = enter(run, record, start)
    return _Between.entered(run, start, buffer)


def _restore(run: Run, between: _Between) -> None:
    """What is not the ranks' as it was before a step, which is then repeated with all of its phases."""
    run.log.go_back(between.step)
    run.inputs.prompts.rewind()
    run.inputs.prompts.skip_to(between.prompts_taken)
    # the reshard makes it the version that it was
    run.fleet.version = between.version - 1
    run.saver.go_back(between.step, between.buffer)
    run.fleet.reshard()
