"""Whether a run may resume from a checkpoint, and what the controller stores in one for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megarl.checkpoints.snapshots import Snapshot, Snapshots
from megarl.config import Recipe
from megarl.fleet.fleet import LEFTOVER, Fleet
from megarl.fleet.rank_groups import RolloutBatch
from megarl.parallel.hf_config import model_shape
from megarl.parallel.roles import Roles, resolve
from megarl.rollout.prompts import PromptStream
from megarl.rollout.sample_file import open_samples
from megarl.types import ModelShape, UserFault, UserFaults

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


def critic_of(roles: Roles) -> dict[str, Any] | None:
    """The critic's shape and expert-parallel size, as `Progress` has them."""
    critic = roles.critic
    return {"shape": asdict(critic.shape), "ep": critic.layout.ep} if critic else None


def _critic_faults(found: Snapshot, then: Progress, recipe: Recipe) -> list[UserFault]:
    now = critic_of(resolve(recipe))
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
