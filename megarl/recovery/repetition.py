"""What is repeated when a training rank fails, and from which state.

The state after the last training is that of a restore point, the newest that there is, and the trainings since: these
are run again with the samples that they had. A training is a function of the state and the samples, so that nothing of
the run is another than without the failure.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from megarl.cluster.actor import Worker
from megarl.cluster.failures import ResultsLost, WorkerFailed
from megarl.printable import Say
from megarl.recovery.rank_processes import RankLoss, RankProcesses
from megarl.recovery.restarts import Restarts
from megarl.recovery.state_copies import CopiesLost, Generation, StateCopies
from megarl.types import Metrics
from megarl.types.losses import Losses

Result = TypeVar("Result")
# trainings whose samples are kept to repeat them: the one that is not copied yet, and the one after it
_MOST_REPEATED = 2
_NO_SLOT = -1  # of faults that no process died of


class CannotRepeat(Exception):
    """There is no state or no sample with which an action can be repeated: the run goes back to before the step."""


@dataclass(frozen=True)
class SavedState:
    """The ranks' state in a checkpoint. version: of the weights that engines had after its step."""

    step: int
    version: int
    folder: Path


class Ranks(Protocol):
    """The training ranks of a run."""

    @property
    def version(self) -> int:
        """Of the published weights."""
        ...

    @property
    def rank_processes(self) -> Sequence[RankProcesses]:
        """Of every model."""
        ...

    @property
    def loss_log(self) -> Losses:
        """Of the run."""
        ...

    @property
    def trained_ranks(self) -> Sequence[Worker]:
        """Those that have a state: of the policy and of an auxiliary model."""
        ...

    def rebuild_ranks(self, *, afresh: bool) -> None:
        """Start all that are lost, afresh: all that are trained; then the policy's ranks have the memory."""
        ...

    def load_state(self, folder: Path) -> None:
        """Load the state of all ranks from a checkpoint."""
        ...

    def state_restored(self, version: int) -> None:
        """The ranks have a state whose weights were published with this version: round them as they were then."""
        ...


class Checkpoints(Protocol):
    """The checkpoints that a run writes."""

    @property
    def saved(self) -> SavedState | None:
        """The newest that is complete."""
        ...

    def set_aside(self) -> None:
        """The checkpoint that is being written cannot be completed, and is written again by `save_again`."""
        ...

    def save_again(self, step: int) -> None:
        """Write it, if it is of this step, after which the ranks' state is now."""
        ...


@dataclass(frozen=True)
class _Training:
    """The training of a step; run: does it once more. version: with which the weights were published after it."""

    step: int
    run: Callable[[], object]
    version: int | None = None


class Repetition:
    """Runs what needs the training ranks, and repeats it after failures; one for a run.

    A rank that fails while nothing waits for it, as in a rollout, is noticed by the next call.
    """

    def __init__(
        self,
        ranks: Ranks,
        checkpoints: Checkpoints,
        copies: StateCopies | None,
        restarts: Restarts | None,
        say: Say,
    ) -> None:
        """copies: None where none are made. restarts: of ranks, by GPU slot; None: every failure ends the run."""
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._copies = copies
        self._restarts = restarts
        self._say = say
        self._step = 0
        self._trainings: list[_Training] = []
        # whether the ranks may have another state than that after `_step`
        self._is_stale = False
        # ranks that were started anew and have got no state since
        self._untouched: set[Worker] = set()
        self._counted: list[RankLoss] = []
        # failures in all, and how many of them were when `admit` was called last
        self._num_counted = 0
        self._num_admitted = 0
        # whether one of them ends the run
        self._is_spent = False
        # of the failures that no line has told yet
        self._causes: list[str] = []
        # ranks that have failed, and are not back
        self._lost: set[str] = set()
        self._last_error = (-1, "")
        self._metrics: defaultdict[str, float] = defaultdict(float)

    def begin(self, step: int) -> None:
        """The ranks have the state after this step, whose weights are published; 0 before the first."""
        self._step = step
        self._trainings = []
        self._is_stale = False
        self._copy()

    def train(self, step: int, run: Callable[[], Result], again: Callable[[], object]) -> Result:
        """The training of a step. again: the same once more, whose results nobody needs."""
        if self._copies:
            self._metrics |= self._copies.settle()
        result = self.attempt(step, run, trains=True)
        self._step = step
        if self._restarts:
            self._trainings.append(_Training(step, again))
            self._forget_old()
        return result

    def published(self, step: int) -> None:
        """The weights of the step's training are published, and the ranks do not compute for a while."""
        self._trainings = [
            replace(training, version=self._ranks.version) if training.step == step else training
            for training in self._trainings
        ]
        self._copy()

    def _copy(self) -> None:
        if self._copies and not self._losses():
            self._copies.begin(self._step, self._ranks.version, self._ranks.trained_ranks)

    def attempt(self, step: int, action: Callable[[], Result], *, trains: bool = False) -> Result:
        """What the action returns, which needs ranks; after a failure they are brought back, and it is repeated.

        trains: whether it changes their state. Raises what ends the run, or CannotRepeat.
        """
        while True:
            end_lost_time = self.lost_time()
            try:
                self._make_whole(step)
                self._are_back()
                return action()
            except CannotRepeat:
                raise
            except Exception as error:
                end_lost_time()
                self.admit(step, error)
                if isinstance(error, ResultsLost):
                    raise CannotRepeat from error
                self._is_stale |= trains

    def _are_back(self) -> None:
        for rank in self._lost:
            self._ranks.loss_log.is_back(rank)
        self._lost.clear()

    def excuse(self, action: Callable[[], None]) -> None:
        """Run an action that the next `attempt` makes good, if it fails by the loss of a rank."""
        try:
            action()
        except WorkerFailed as failure:
            if self._restarts is None:
                raise
            self._end_ranks_of(failure)
            if not self._losses():
                raise

    def admit(self, step: int, error: Exception) -> None:
        """Count a failure, and end the ranks of which one has failed.

        Raises the error where it ends the run: it is not of a rank, it is the same as before in the same step, or its
        slot has failed too often.
        """
        may_repeat = getattr(error, "may_repeat", False)
        if self._restarts is None or not (may_repeat or isinstance(error, WorkerFailed)):
            raise error
        if isinstance(error, WorkerFailed):
            self._end_ranks_of(error)
        if isinstance(error, ResultsLost):
            # no fault of a rank
            self._counted += [loss for loss in self._losses() if loss.cause is error]
            self._count(_NO_SLOT, "fault", error, "")
        if may_repeat:
            self._refuse_repeated(step, error)
            self._count(_NO_SLOT, "fault", error, "")
        self._count_losses(step)
        is_new = self._num_counted > self._num_admitted
        self._num_admitted = self._num_counted
        if self._is_spent or not is_new:
            raise error

    def _end_ranks_of(self, failure: WorkerFailed) -> None:
        """End the ranks among which the one is that has failed; their state is not to be trusted."""
        for processes in self._ranks.rank_processes:
            processes.end_for(failure)

    def _losses(self) -> list[RankLoss]:
        return [processes.loss for processes in self._ranks.rank_processes if processes.loss]

    def _count_losses(self, step: int) -> None:
        """Count the losses that are not counted yet. Raises as `admit`."""
        for loss in self._losses():
            if loss in self._counted:
                continue
            self._counted.append(loss)
            if loss.kind == "error":
                self._refuse_repeated(step, loss.cause)
            self._count(loss.slot, loss.kind, loss.cause, loss.rank)

    def _count(self, slot: int, kind: str, cause: Exception, rank: str) -> None:
        assert self._restarts
        self._num_counted += 1
        name = rank or "a step"
        self._lost.add(name)
        self._ranks.loss_log.add(name, cause)
        if not self._restarts.admit(slot):
            self._is_spent = True
            what = "it was lost" if rank else "such faults came"
            problem = f"{cause}; {what} more than {self._restarts.most} times (run.restarts)"
            evidence = getattr(cause, "evidence", str(cause))
            raise WorkerFailed(problem, evidence, rank, getattr(cause, "memory", None)) from cause
        self._causes.append(str(cause))
        self._metrics[f"recovery/rank_{kind}s"] += 1

    def _refuse_repeated(self, step: int, error: Exception) -> None:
        """Raise an error that is the same as before, in the same step: it would come again and again."""
        if self._last_error == (step, str(error)):
            self._is_spent = True
            raise error
        self._last_error = (step, str(error))

    def _make_whole(self, step: int) -> None:
        """Have all ranks with the state after the last training. Raises CannotRepeat where no state leads there."""
        self._count_losses(step)
        losses = self._losses()
        self._is_stale |= any(loss.is_trained for loss in losses)
        if not (self._is_stale or losses):
            return
        end_lost_time = self.lost_time()
        if self._is_stale:
            self._restore()
        else:
            self._say_causes("these ranks are started anew")
            self._rebuild(afresh=False)
        end_lost_time()

    def _restore(self) -> None:
        """Bring back the state after the last training. Raises CannotRepeat."""
        if self._copies:
            # before this it is not known whether the newest is whole
            self._copies.settle()
        point = self._restore_point()
        self._say_causes(f"the ranks go on from the state after step {point.step}")
        self._checkpoints.set_aside()
        # a checkpoint lacks what a rank that goes on has beyond it
        self._rebuild(afresh=isinstance(point, SavedState))
        point = self._with_state(point)
        self._ranks.state_restored(point.version)
        self._checkpoints.save_again(point.step)
        repeated = self._trainings_after(point.step)
        for training in repeated:
            training.run()
            if training.version is not None:
                self._ranks.state_restored(training.version)
            self._checkpoints.save_again(training.step)
        self._is_stale = False
        if repeated:
            self._copy_at_once(repeated[-1].version)

    def _with_state(self, point: Generation | SavedState) -> Generation | SavedState:
        """Give the ranks, once they are rebuilt, the state of a point, which is returned.

        It is that of the next newest point where copies were lost meanwhile. Raises CannotRepeat where there is none.
        """
        while isinstance(point, Generation):
            assert self._copies
            untouched = self._untouched
            self._untouched = set()
            try:
                self._copies.restore(point, self._ranks.trained_ranks)
                return point
            except CopiesLost as lost:
                if lost.ranks_are_untouched:
                    self._untouched = untouched
                point = self._restore_point()
                self._say(f"{lost}; the ranks go on from the state after step {point.step}")
        # ranks that have got a part of a copy are started once more, and so are all others
        self._rebuild(afresh=True)
        self._untouched = set()
        self._ranks.load_state(point.folder)
        return point

    def _copy_at_once(self, version: int | None) -> None:
        """Copy a state that was reached by trainings again, or the next loss would need one more of them.

        version: with which its weights were published; None if they were not yet.
        """
        if self._copies and version is not None:
            self._copies.begin(self._step, version, self._ranks.trained_ranks)
            self._copies.settle()
            self._forget_old()

    def _rebuild(self, *, afresh: bool) -> None:
        """As `rebuild_ranks`; trained ranks are not started again where all of them are untouched and none is lost.

        Nothing is started then, unless ranks of the reward model are lost: these alone are.
        """
        before = {*self._ranks.trained_ranks}
        losses = self._losses()
        if afresh and before <= self._untouched and not any(loss.is_trained for loss in losses):
            if not losses:
                return
            afresh = False
        self._ranks.rebuild_ranks(afresh=afresh)
        after = {*self._ranks.trained_ranks}
        self._untouched = (after - before) | (after & self._untouched)
        self._counted.clear()

    def _say_causes(self, what: str) -> None:
        for cause in self._causes:
            self._say(f"{cause}; {what}")
        self._causes = []

    def _restore_point(self) -> Generation | SavedState:
        """The newest state from which the kept trainings lead to that after the last. Raises CannotRepeat."""
        points = [self._copies and self._copies.newest, self._checkpoints.saved]
        usable = [point for point in points if point and self._leads_here(point.step)]
        if not usable:
            raise CannotRepeat
        return max(usable, key=lambda point: point.step)

    def _leads_here(self, step: int) -> bool:
        return len(self._trainings_after(step)) == self._step - step

    def _trainings_after(self, step: int) -> list[_Training]:
        return [training for training in self._trainings if training.step > step]

    def _forget_old(self) -> None:
        """Free the samples of trainings that will not be repeated."""
        safe_steps = [self._copies and self._copies.safe_step]
        if saved := self._checkpoints.saved:
            safe_steps.append(saved.step)
        known = [step for step in safe_steps if step is not None]
        self._trainings = self._trainings_after(max(known, default=-1))[-_MOST_REPEATED:]
        if not any(map(self._leads_here, known)):
            self._trainings = []

    def go_back(self, step: int) -> bool:
        """Bring back the state after an earlier step, or the last; whether there is one that leads to it."""
        self._trainings = [training for training in self._trainings if training.step <= step]
        self._step = step
        self._is_stale = True
        try:
            self.attempt(step + 1, lambda: None)
        except CannotRepeat:
            return False
        return True

    def start_over(self, words: str) -> None:
        """Start all ranks that are trained, because the run goes back to a checkpoint or its start, as `words` say."""
        self._say_causes(words)
        if self._copies:
            self._copies.forget()
        self._trainings = []
        self._rebuild(afresh=True)
        self._untouched = set()

    def lost_time(self) -> Callable[[], None]:
        """Begins now; the call ends it, and counts it once with all that was counted meanwhile."""
        began_s = time.monotonic()
        before_s = self._metrics.get("recovery/seconds", 0.0)

        def end() -> None:
            self._metrics["recovery/seconds"] = before_s + time.monotonic() - began_s

        return end

    def take_metrics(self) -> Metrics:
        """What failures and copies have cost since the last call."""
        metrics = dict(self._metrics)
        self._metrics.clear()
        return metrics
