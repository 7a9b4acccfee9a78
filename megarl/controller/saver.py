"""A run's checkpoints: when one is written, what the controller stores in it, and whether a run may resume from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megarl.checkpoints.snapshots import Digest, Snapshot, Snapshots
from megarl.cluster import processes
from megarl.config import Recipe
from megarl.disk import writing
from megarl.fleet.fleet import LEFTOVER, Fleet
from megarl.fleet.rank_groups import RolloutBatch
from megarl.parallel.hf_config import model_shape
from megarl.parallel.roles import Roles, resolve
from megarl.rollout.prompts import PromptStream
from megarl.rollout.sample_file import open_samples
from megarl.types import EndedEarly, Metrics, ModelShape, UserFault, UserFaults

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Progress:
    """What the controller resumes from after step `step`; version and attempts are those before its publication."""

    step: int
    version: int
    attempts: int
    prompts_taken: int
    data: str
    seed: int
    ep: int
    trains_mtp: bool
    shape: dict[str, object]
    critic: dict[str, Any] | None  # its shape and ep, in a run with a critic


def find(recipe: Recipe, prompts: PromptStream, say: Callable[[str], None]) -> Snapshot | None:
    """The newest undamaged checkpoint of the recipe's run; None if there is none yet.

    Raises UserFaults where its model or data are not the recipe's, or it cannot be loaded into the recipe's layout.
    """
    found = Snapshots(Path(recipe.run.dir) / recipe.run.name / FOLDER, say).newest()
    if found is None:
        return None
    faults, then = model_faults(found, recipe), Progress(**found.run)
    if then.data != prompts.fingerprint:
        problem = f"its rows, or the weights of its files, have changed since {found.folder} was written"
        mend = "use the files, weights and data.overlong that the run began with, or another run.name"
        faults.append(UserFault("data.train", problem, mend))
    if then.seed != recipe.run.seed:
        problem = f"{recipe.run.seed} shuffles the data differently from {then.seed}, the seed of {found.folder}"
        faults.append(UserFault("run.seed", problem, f"set it to {then.seed}, or choose another run.name"))
    if (then.ep == 1) != (recipe.train.ep == 1):
        problem = f"{found.folder} was written with {then.ep}, and Megatron does not convert the optimizer to or from 1"
        faults.append(UserFault("train.ep", problem, "set it to more than 1" if then.ep > 1 else "set it to 1"))
    if recipe.train.mtp_loss and not then.trains_mtp:
        problem = f"{recipe.train.mtp_loss}, but in {found.folder} those layers were frozen and have no optimizer state"
        faults.append(UserFault("train.mtp_loss", problem, "set it to 0, or choose another run.name"))
    faults += _critic_faults(found, then, recipe) + _leftover_faults(found)
    if faults:
        raise UserFaults(faults)
    return found


def _leftover_faults(found: Snapshot) -> list[UserFault]:
    """The fault of leftover groups in a file format of another version."""
    if (found.folder / LEFTOVER).exists():
        try:
            open_samples(found.folder / LEFTOVER)
        except UserFault as fault:
            mend = "resume with the version that wrote it, or choose another run.name"
            return [UserFault(fault.where, fault.problem, mend)]
    return []


def _critic_of(roles: Roles) -> dict[str, Any] | None:
    critic = roles.critic
    return {"shape": asdict(critic.shape), "ep": critic.layout.ep} if critic else None


def _critic_faults(found: Snapshot, then: Progress, recipe: Recipe) -> list[UserFault]:
    now = _critic_of(resolve(recipe))
    if now is None:
        return []
    if then.critic is None:
        problem = f"{recipe.algorithm.name} has a critic, and {found.folder} was written without one"
        return [UserFault("algorithm.name", problem, "choose another run.name")]
    if _with_defaults(then.critic["shape"]) != now["shape"]:
        problem = f"{found.folder} was written with a critic of another architecture"
        return [UserFault("critic.path", problem, "use the model that the run began with, or another run.name")]
    if (then.critic["ep"] == 1) != (now["ep"] == 1):
        problem = f"{found.folder} was written with {then.critic['ep']}, which Megatron does not convert to or from 1"
        mend = "set it to more than 1" if then.critic["ep"] != 1 else "set it to 1"
        return [UserFault("critic.ranks.ep", problem, mend)]
    return []


def model_faults(snapshot: Snapshot, recipe: Recipe) -> list[UserFault]:
    """Where the weights of a checkpoint do not fit the recipe's model.

    Raises UserFaults where another version of megarl wrote it.
    """
    try:
        then = Progress(**snapshot.run)
    except TypeError:
        mend = "use the version of megarl that wrote it, or another run"
        raise UserFaults([UserFault(str(snapshot.folder), "was written by another version of megarl", mend)]) from None
    shape = asdict(model_shape(recipe.model.path))
    known = _with_defaults(then.shape)
    if known == shape:
        return []
    key = next(name for name in shape if known.get(name) != shape[name])
    problem = f"{snapshot.folder} is of a model with {key} {known.get(key)}, this one has {shape[key]}"
    return [UserFault("model.path", problem, "use the model that the run began with, or another run.name")]


def _with_defaults(stored: dict[str, object]) -> dict[str, object]:
    """A checkpoint's shape, with the defaults of fields that are newer than the checkpoint."""
    return {one.name: one.default for one in fields(ModelShape) if one.default is not MISSING} | stored


def resume(snapshot: Snapshot, fleet: Fleet, prompts: PromptStream) -> RolloutBatch:
    """Load a checkpoint into the ranks and move the data on to where it was; the leftover groups."""
    then = Progress(**snapshot.run)
    leftover = fleet.resume(snapshot.folder, then.version, then.attempts)
    prompts.skip_to(then.prompts_taken)
    return leftover


@dataclass(frozen=True)
class _RunState:
    """The run after its last step: what a checkpoint of it holds besides the ranks' files."""

    progress: Progress
    leftover: RolloutBatch


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint that is being written; digests: of the files that the fleet has completed already."""

    folder: Path
    progress: Progress
    digests: dict[str, Digest] = field(default_factory=dict)


class Saver:
    """Writes checkpoints as the recipe wants them, at most one at a time."""

    def __init__(self, recipe: Recipe, fleet: Fleet, prompts: PromptStream, folder: Path, say: Callable[[str], None]):
        self._recipe, self._fleet, self._prompts = recipe, fleet, prompts
        self._snapshots = Snapshots(folder / FOLDER, say)
        self._now: _RunState | None = None
        self._is_saved = False  # whether a checkpoint of `_now` is begun or written
        self._begun: _OpenCheckpoint | None = None
        self._is_recorded = False  # whether the record of the step that `_begun` is of is written

    def is_due(self, step: int) -> bool:
        """Every so many steps, after a warm start and at the end."""
        every = self._recipe.checkpoint.every
        if every is None:
            return False
        return step % every == 0 if 0 < step < self._recipe.run.steps else True

    def begin(self, step: int, leftover: RolloutBatch) -> Metrics:
        """Begin a checkpoint if it is due; the readings of memory that was handed over for it.

        Call it while the training ranks hold their memory, before the publication. leftover: groups for the next step.
        """
        self._now, self._is_saved = _RunState(self._progress(step), leftover), False
        return self._write(self._now) if self.is_due(step) else {}

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            version=self._fleet.version,
            attempts=self._fleet.attempts,
            prompts_taken=self._prompts.taken,
            data=self._prompts.fingerprint,
            seed=self._recipe.run.seed,
            ep=self._recipe.train.ep,
            trains_mtp=self._recipe.train.mtp_loss > 0,
            shape=asdict(self._fleet.roles.policy.shape),
            critic=_critic_of(self._fleet.roles),
        )

    def _write(self, now: _RunState) -> Metrics:
        self._complete()  # at most one at a time
        with self._writing(now.progress.step):
            begun = _OpenCheckpoint(self._snapshots.begin(now.progress.step), now.progress)
            self._begun, self._is_recorded, self._is_saved = begun, False, True
            digests, readings = self._fleet.save(begun.folder.absolute(), now.leftover)
            self._begun = replace(begun, digests=digests)
        return readings

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Where the disk is full, the partial checkpoint is removed, so that other files have its space."""
        try:
            with writing(self._snapshots.folder.parent, f"the checkpoint of step {step}"):
                yield
        except UserFault:
            begun, self._begun, self._is_saved = self._begun, None, False
            if begun:
                self._snapshots.abandon(begun.folder)
            raise

    def settle(self, step: int) -> None:
        """After the step's record is written: complete the checkpoint, an asynchronous checkpoint a step later."""
        is_young = self._begun is not None and self._begun.progress.step == step < self._recipe.run.steps
        self._is_recorded = True
        if not (self._recipe.checkpoint.asynchronous and is_young):
            self._complete()

    def leave_if_wanted(self) -> None:
        """Between two steps: after a SIGUSR1, complete a checkpoint of the last step and raise EndedEarly."""
        if not processes.is_end_wanted():
            return
        if self._now is not None and not self._is_saved:
            self._write(self._now)
        self._complete()
        raise EndedEarly(self._now.progress.step if self._now is not None else None)

    def rescue(self) -> None:
        """After a failure: complete the checkpoint of an earlier step, if the training ranks still can."""
        if self._is_recorded:
            self._complete()

    def _complete(self) -> None:
        if self._begun is None:
            return
        begun = self._begun
        with self._writing(begun.progress.step):
            digests = self._fleet.finish_save(begun.digests)
            self._snapshots.commit(begun.folder, asdict(begun.progress), digests, self._recipe.checkpoint.keep)
        self._begun = None
