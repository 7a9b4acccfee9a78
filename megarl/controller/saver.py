"""A run's checkpoints: when one is begun, completed or abandoned. What is in one is in `resuming`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megarl.checkpoints.snapshots import Digest, Snapshots
from megarl.cluster import processes
from megarl.config import Recipe
from megarl.controller.resuming import (
    FOLDER,
    BufferState,
    Progress,
    adapter_identity,
    critic_of,
    sampling_keys,
)
from megarl.data.streams import PromptStream
from megarl.disk import writing
from megarl.fleet.fleet import Fleet
from megarl.fleet.rank_groups import GroupBuffer
from megarl.types import EndedEarly, Metrics, UserError


@dataclass(frozen=True)
class _RunState:
    """The run after its last step: what a checkpoint of it holds besides the ranks' files.

    buffer: None once a checkpoint of the step is begun or written.
    """

    progress: Progress
    buffer: GroupBuffer | None


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint that is being written; digests: of the files that the fleet has completed already.

    is_recorded: whether the record of its step is written, since its last file was begun.
    """

    folder: Path
    progress: Progress
    digests: dict[str, Digest] = field(default_factory=dict)
    is_recorded: bool = False


class Saver:
    """Writes checkpoints as the recipe wants them, at most one at a time.

    Between two calls it keeps the run's last step, and the checkpoint that is being written.
    """

    def __init__(
        self,
        recipe: Recipe,
        fleet: Fleet,
        prompts: PromptStream,
        folder: Path,
        say: Callable[[str], None],
    ):
        self._recipe = recipe
        self._fleet = fleet
        self._prompts = prompts
        self._snapshots = Snapshots(folder / FOLDER, say)
        self._last: _RunState | None = None
        self._begun: _OpenCheckpoint | None = None

    def is_due(self, step: int) -> bool:
        """Every so many steps, after a warm start and at the end."""
        every = self._recipe.checkpoint.every
        if every is None:
            return False
        if 0 < step < self._recipe.run.steps:
            return step % every == 0
        return True

    def begin(self, step: int, buffer: GroupBuffer) -> Metrics:
        """Begin a checkpoint if it is due; the readings of memory that was handed over for it.

        Call it while the training ranks hold their memory, before the publication. buffer: for the next step.
        """
        self._last = _RunState(self._progress(step, buffer), buffer)
        if self.is_due(step):
            return self._write(self._last.progress, buffer)
        return {}

    def _progress(self, step: int, buffer: GroupBuffer) -> Progress:
        return Progress(
            step=step,
            version=self._fleet.version,
            attempts=self._fleet.attempts,
            prompts_taken=self._prompts.taken,
            data=self._prompts.fingerprint,
            seed=self._recipe.run.seed,
            trains_mtp=self._recipe.train.mtp_loss > 0,
            shape=asdict(self._fleet.roles.policy.shape),
            critic=critic_of(self._fleet.roles),
            buffer=BufferState.of(buffer),
            sampling=sampling_keys(self._recipe),
            lora=adapter_identity(self._recipe),
        )

    def _write(self, progress: Progress, buffer: GroupBuffer) -> Metrics:
        self._complete()  # at most one at a time
        with self._writing(progress.step):
            begun = _OpenCheckpoint(self._snapshots.begin(progress.step), progress)
            self._begun = begun
            self._last = _RunState(progress, buffer=None)
            digests, readings = self._fleet.save(begun.folder.absolute(), buffer)
            self._begun = replace(begun, digests=digests)
        return readings

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Where the disk is full, the partial checkpoint is removed, so that other files have its space."""
        try:
            with writing(self._snapshots.folder.parent, f"the checkpoint of step {step}"):
                yield
        except UserError:
            if self._begun:
                self._snapshots.abandon(self._begun.folder)
                self._begun = None
            raise

    def settle(self, step: int) -> None:
        """After the step's record is written: complete the checkpoint, an asynchronous checkpoint a step later."""
        if self._begun is None:
            return
        self._begun = replace(self._begun, is_recorded=True)
        is_young = self._begun.progress.step == step < self._recipe.run.steps
        if not (self._recipe.checkpoint.asynchronous and is_young):
            self._complete()

    def leave_if_wanted(self) -> None:
        """Before a step or a phase of it: after a SIGUSR1, complete a checkpoint of the last step and raise EndedEarly.

        The phases of the step that was begun are lost, and repeated by the run that resumes.
        """
        if not processes.is_end_wanted():
            return
        if self._last is None:
            raise EndedEarly(None)
        if self._last.buffer is not None:
            self._write(self._last.progress, self._last.buffer)
        self._complete()
        raise EndedEarly(self._last.progress.step)

    def rescue(self) -> None:
        """After a failure: complete the checkpoint of a step that has its record, if the training ranks still can."""
        if self._begun is not None and self._begun.is_recorded:
            self._complete()

    def _complete(self) -> None:
        if self._begun is None:
            return
        begun = self._begun
        with self._writing(begun.progress.step):
            digests = self._fleet.finish_save(begun.digests)
            self._snapshots.commit(
                begun.folder, asdict(begun.progress), digests, self._recipe.checkpoint.keep
            )
        self._begun = None
