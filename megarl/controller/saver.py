"""A run's checkpoints: when one is begun, completed or abandoned. What is in one is in `resuming`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megarl.checkpoints.snapshots import Digest, Snapshot, Snapshots
from megarl.cluster import processes
from megarl.config import Recipe
from megarl.controller.resuming import (
    FOLDER,
    BufferState,
    Progress,
    adapter_identity,
    critic_of,
    model_keys,
    progress_of,
    sampling_keys,
)
from megarl.data.streams import PromptStream
from megarl.disk import while_answering, writing
from megarl.fleet.fleet import Fleet
from megarl.fleet.rank_groups import GroupBuffer
from megarl.printable import Say
from megarl.recovery.repetition import SavedState
from megarl.tracking.draining import DrainRequests
from megarl.types import DiskFault, Drained, EndedEarly, Metrics, UserError

_LONG_WAIT_S = 10.0  # for a checkpoint that the next one waits for; longer waits are said
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _RunState:
    """The run after its last step: what a checkpoint of it holds besides the ranks' files.

    buffer: None once a checkpoint of the step is complete.
    """

    progress: Progress
    buffer: GroupBuffer | None


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint that is being written; digests: of the files that the fleet has completed already.

    buffer: to write it again. is_recorded: whether the record of its step is written, since its last file was begun.
    """

    folder: Path
    progress: Progress
    buffer: GroupBuffer
    digests: dict[str, Digest] = field(default_factory=dict)
    is_recorded: bool = False


class Saver:
    """Writes checkpoints as the recipe wants them, at most one at a time.

    Between two calls it keeps the run's last step, and the checkpoint that is being written. Where the disk does not
    take a checkpoint the run goes on, as often in a row as `checkpoint.may_fail` says, but not after its last step.
    """

    def __init__(
        self,
        recipe: Recipe,
        fleet: Fleet,
        prompts: PromptStream,
        folder: Path,
        say: Say,
        drain: DrainRequests | None = None,
    ):
        """folder: the run's. say: prints a line. drain: the requests of `megarl drain`, where the run hears them."""
        self._recipe = recipe
        self._drain = drain
        self._fleet = fleet
        self._prompts = prompts
        self._say = say
        self._snapshots = Snapshots(folder / FOLDER, say)
        self._last: _RunState | None = None
        self._begun: _OpenCheckpoint | None = None
        # whose ranks were lost before it was complete
        self._aside: _OpenCheckpoint | None = None
        self.saved: SavedState | None = None
        self._num_failed = 0  # in a row
        self._failed_step: int | None = None
        self._waited_s = 0.0  # for files, since the last record

    def is_due(self, step: int) -> bool:
        """Every so many steps, after a warm start and at the end; after each while `megarl drain` waits for it."""
        if self._is_drain_wanted:
            return True
        every = self._recipe.checkpoint.every
        if every is None:
            return False
        if 0 < step < self._recipe.run.steps:
            return step % every == 0
        return True

    def begin(self, step: int, buffer: GroupBuffer) -> Metrics:
        """Begin a checkpoint if it is due; the readings of memory that was handed over for it, and of the disk.

        Call it while the training ranks hold their memory, before the publication. buffer: for the next step.
        """
        self._last = _RunState(self._progress(step, buffer), buffer)
        metrics: Metrics = {}
        if self.is_due(step):
            # where ranks were lost in it, it has been begun once more already
            if self._open_step != step:
                self._make_way(step)
                with self._tolerating(step):
                    metrics |= self._write(self._last)
            metrics["checkpoint/failed"] = self._num_failed
        if self._waited_s:
            metrics["checkpoint/waited_s"] = self._waited_s
            self._waited_s = 0.0
        return metrics

    @property
    def is_open(self) -> bool:
        """Whether a checkpoint is begun and not complete."""
        return self._begun is not None

    @property
    def _open_step(self) -> int | None:
        return self._begun.progress.step if self._begun else None

    def _progress(self, step: int, buffer: GroupBuffer) -> Progress:
        return Progress(
            step=step,
            version=self._fleet.version,
            attempts=self._fleet.attempts,
            prompts_taken=self._prompts.taken,
            data=self._prompts.fingerprint,
            seed=self._recipe.run.seed,
            trains_mtp=self._recipe.train.mtp_loss > 0,
            optimizer=self._recipe.train.optimizer_name,
            shape=asdict(self._fleet.roles.policy.shape),
            critic=critic_of(self._fleet.roles),
            buffer=BufferState.of(buffer),
            sampling=sampling_keys(self._recipe),
            lora=adapter_identity(self._recipe),
            model=model_keys(self._recipe),
        )

    def _make_way(self, step: int) -> None:
        """Complete the checkpoint before the one of this step: there is at most one at a time."""
        if self._begun is None:
            return
        earlier = self._begun.progress.step
        began = time.monotonic()
        self._complete_or_go_on()
        waited_s = time.monotonic() - began
        if waited_s >= _LONG_WAIT_S:
            self._say(
                f"the checkpoint of step {step} waited {waited_s:.0f} s for the files of that of step {earlier}: the "
                f"disk of {self._snapshots.folder} is slow for checkpoint.every ({self._recipe.checkpoint.every})"
            )

    def _write(self, state: _RunState) -> Metrics:
        """Begin a checkpoint of a step that has none; no other is open."""
        assert state.buffer is not None
        self._aside = None
        return self._open(state.progress, state.buffer)

    def _open(self, progress: Progress, buffer: GroupBuffer) -> Metrics:
        step = progress.step
        with self._writing(step):
            folder = self._on_disk(partial(self._snapshots.begin, step), step)
            begun = _OpenCheckpoint(folder, progress, buffer)
            self._begun = begun
            digests, readings = self._fleet.save(begun.folder.absolute(), buffer)
            self._begun = replace(begun, digests=digests)
        return readings

    def resumed(self, snapshot: Snapshot) -> None:
        """The run has resumed from this checkpoint."""
        self.saved = _saved(snapshot.folder, progress_of(snapshot))

    def set_aside(self) -> None:
        """Remove what there is of the checkpoint that is being written, because ranks are gone that write it."""
        begun = self._begun
        if begun is None:
            return
        step = begun.progress.step
        self._on_disk(partial(self._snapshots.abandon, begun.folder), step)
        self._begun = None
        # one that is lost while it is written again is recorded as it was before
        if self._aside is None or self._aside.progress.step != step:
            self._aside = begun

    def save_again(self, step: int) -> None:
        """Write the checkpoint that was set aside, if it is of this step, whose state the ranks have again.

        It is completed at once if the step has its record: a further loss would need its samples once more. One of an
        earlier step is given up: the ranks' state is later.
        """
        aside = self._aside
        if aside is None or aside.progress.step > step:
            return
        if aside.progress.step < step:
            self._say(
                f"the checkpoint of step {aside.progress.step} is not written: the ranks that wrote it are lost"
            )
        else:
            with self._tolerating(step):
                self._open(aside.progress, aside.buffer)
                if aside.is_recorded:
                    self._complete()
        self._aside = None

    def go_back(self, step: int, buffer: GroupBuffer) -> None:
        """The run goes back to before the publication of this step's weights, and what is being written is removed.

        buffer: of the step. 0: to its start, which no checkpoint is written of.
        """
        self.set_aside()
        self._aside = None
        self._last = None
        if not step:
            self.saved = None
        else:
            is_saved = self.saved is not None and self.saved.step == step
            self._last = _RunState(self._progress(step, buffer), None if is_saved else buffer)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Where the disk is full, the partial checkpoint is removed, so that other files have its space."""
        try:
            with writing(self._snapshots.folder.parent, f"the checkpoint of step {step}"):
                yield
        except UserError:
            if self._begun:
                folder = self._begun.folder
                self._begun = None
                self._on_disk(partial(self._snapshots.abandon, folder), step)
            raise

    def _on_disk(self, function: Callable[[], _Result], step: int) -> _Result:
        """The result of a function that works on the run's disk; raises Silence where the disk does not answer."""
        return while_answering(
            function,
            self._snapshots.folder.parent,
            f"the checkpoint of step {step}",
            self._recipe.run.timeout_s,
        )

    @contextmanager
    def _tolerating(self, step: int) -> Iterator[None]:
        """Go on after a checkpoint of this step that the disk does not take, unless it is one too many or the last."""
        try:
            yield
        except DiskFault as fault:
            self._num_failed += 1
            self._failed_step = step
            if step >= self._recipe.run.steps:
                raise
            may_fail = self._recipe.checkpoint.may_fail
            count = f"{self._num_failed} in a row, of which checkpoint.may_fail allows {may_fail}"
            if self._num_failed > may_fail:
                raise DiskFault(fault.where, f"{fault.problem} ({count})", fault.hint) from fault
            self._say(f"the run goes on without the checkpoint of step {step} ({count}): {fault}")

    def settle(self, step: int) -> None:
        """After the step's record is written: complete the checkpoint.

        An asynchronous one is completed at the end of a later step, when its files are written, or before the next one.
        """
        if self._begun is None:
            return
        self._begun = replace(self._begun, is_recorded=True)
        if self._recipe.checkpoint.asynchronous and step < self._recipe.run.steps:
            is_young = self._begun.progress.step == step
            if is_young or not self._fleet.has_saved():
                return
        self._complete_or_go_on()

    def leave_if_wanted(self) -> None:
        """Before a step: after a SIGUSR1 or `megarl drain` complete a checkpoint of the last step; raise EndedEarly.

        After `megarl drain` the run goes on if the disk did not take the checkpoint in its step. Raises DiskFault.
        """
        self.leave_within_step()
        if not self._is_drain_wanted:
            return
        last = self._last
        if last is None:
            raise Drained(None)
        self._complete_or_go_on()
        if self._failed_step == last.progress.step:
            self._decline()
            return
        self._save_last(last)
        raise Drained(last.progress.step)

    def leave_within_step(self) -> None:
        """Before a phase of a step: the same after a SIGUSR1.

        The phases of the step that was begun are lost, and repeated by the run that resumes.
        """
        if not processes.is_end_wanted():
            return
        if self._last is None:
            raise EndedEarly(None)
        self._save_last(self._last)
        raise EndedEarly(self._last.progress.step)

    @property
    def _is_drain_wanted(self) -> bool:
        return self._drain is not None and self._drain.is_wanted

    def _decline(self) -> None:
        assert self._drain is not None
        self._drain.decline()
        self._say(
            "the run does not end for megarl drain: without that checkpoint the step would be lost"
        )

    def _save_last(self, last: _RunState) -> None:
        """Complete a checkpoint of the last step, which may be the one that is open. Raises DiskFault."""
        self._complete_or_go_on()
        if self._last is last and last.buffer is not None:
            self._write(last)
            self._complete()

    def rescue(self) -> None:
        """After a failure: complete the checkpoint of a step that has its record, if the training ranks still can."""
        if self._begun is not None and self._begun.is_recorded:
            self._complete()

    def _complete_or_go_on(self) -> None:
        if self._begun is not None:
            with self._tolerating(self._begun.progress.step):
                self._complete()

    def _complete(self) -> None:
        """Wait for the files of the checkpoint that is open, if one is, and complete it."""
        if self._begun is None:
            return
        begun = self._begun
        step = begun.progress.step
        began = time.monotonic()
        try:
            with self._writing(step):
                digests = self._fleet.finish_save(begun.digests)
                state = asdict(begun.progress)
                keep = self._recipe.checkpoint.keep
                commit = partial(self._snapshots.commit, begun.folder, state, digests, keep)
                folder = self._on_disk(commit, step)
        finally:
            self._waited_s += time.monotonic() - began
        self._begun = None
        self.saved = _saved(folder, begun.progress)
        self._num_failed = 0
        if self._last and self._last.progress.step == step:
            self._last = replace(self._last, buffer=None)


def _saved(folder: Path, progress: Progress) -> SavedState:
    """The weights were published once more after the checkpoint was begun."""
    return SavedState(progress.step, progress.version + 1, folder.absolute())
