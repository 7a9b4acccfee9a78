"""Whether a run may resume from a checkpoint, and what the controller stores in one for that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.checkpoints.hf_import import fingerprint
from megarl.checkpoints.snapshots import Snapshot, Snapshots
from megarl.config import Recipe
from megarl.data.streams import PromptStream
from megarl.fleet.fleet import Fleet, buffer_file
from megarl.fleet.rank_groups import GroupBuffer
from megarl.model.hf_config import model_shape
from megarl.model.shape import ModelShape
from megarl.placement.roles import Roles, lora_size, resolve
from megarl.printable import Say
from megarl.samples.buffer import Entry
from megarl.samples.parquet import open_samples
from megarl.types import UserError, UserErrors
from megarl.types.json_objects import JsonObject
from megarl.types.listed import ErrorIterator, listed

FOLDER = "checkpoints"
# of a checkpoint. 1, without a number: the optimizer's state was gathered, and each tensor of a rank written whole.
# 2: each rank writes boxes of the same tensors (parallel/stored_boxes.py).
FORMAT = 2
OLDEST_FORMAT = 1  # that is read
_SAME_MODEL = "use the model that the run began with"
# of fields of `Progress`, in checkpoints of before 26 November 2026
_EARLIER_NAMES = {"stock": "buffer"}
# What JSON has is of the annotated type itself, so that true is no int, and nothing is missing or unknown.
_AS_STORED = ConfigDict(strict=True, extra="forbid")
_OF_ANOTHER_VERSION = ("missing", "unexpected_keyword_argument")  # pydantic's kinds of faults
State = TypeVar("State", "Progress", "BufferState")
Digits = Annotated[str, Field(pattern="^[0-9a-f]+$")]
Number = Annotated[str, Field(pattern="^[0-9]{1,18}$")]
# Of `sampling_keys`, those that also bind complete groups.
_COMPLETE_GROUP_KEYS = (
    *("rollout.samples_per_prompt", "rollout.temperature", "rollout.top_p"),
    *("train.replay", "algorithm.name"),
)
# Keys of a recipe on which the open groups of a buffer depend, as they are written.
_OF_ROLLOUT = (
    *("samples_per_prompt", "temperature", "top_p", "max_response_tokens", "phase_tokens"),
    *("prompts_per_step", "ahead"),
)
_OF_EPISODE = ("tools", "environment", "max_tokens", "history")


@dataclass(frozen=True)
class BufferState:
    """A buffer's counters and drawn prompts; its groups have a file of their own.

    streams: by number in the buffer, in the groups' order. has_open: whether any of these is open. trained, dropped: as
    in `RolloutBuffer`, in hexadecimal digits. surplus: of `RolloutBuffer`; a checkpoint without it is of a run that
    begins with none.
    """

    __pydantic_config__ = _AS_STORED

    next_number: int
    trained: Digits
    dropped: Digits
    streams: dict[Number, list[int]]
    has_open: bool
    surplus: int = 0

    @staticmethod
    def of(buffer: GroupBuffer) -> JsonObject:
        """The state as JSON stores it. Raises RuntimeError where a drawn prompt is lost or counted twice."""
        buffer.check()
        state = BufferState(
            next_number=buffer.next_number,
            trained=f"{buffer.trained:x}",
            dropped=f"{buffer.dropped:x}",
            streams={str(entry.number): [*entry.stream] for entry in buffer.entries},
            has_open=bool(buffer.open),
            surplus=buffer.surplus,
        )
        return asdict(state)


@dataclass(frozen=True)
class Progress:
    """What the controller resumes from after step `step`; version and attempts are those before its publication."""

    __pydantic_config__ = _AS_STORED

    step: int
    version: int
    attempts: int
    prompts_taken: Annotated[int, Field(ge=0)]
    data: str
    seed: int
    trains_mtp: bool
    shape: dict[str, object]
    critic: JsonObject | None  # `critic_of`, in a run with a critic
    buffer: JsonObject  # `BufferState`
    sampling: JsonObject  # what the groups of the buffer depend on: `sampling_keys`
    lora: JsonObject | None = None  # `adapter_identity`, in a run that trains adapters
    model: JsonObject = field(default_factory=dict)  # `model_keys`; empty before 28 November 2026
    optimizer: str = "adamw"  # `train.optimizer_name`
    format: int = FORMAT


def find(recipe: Recipe, prompts: PromptStream, say: Say) -> Snapshot | None:
    """The newest undamaged checkpoint of the recipe's run; None if there is none yet.

    Raises UserErrors where its model, data or samples are not the recipe's.
    """
    snapshot = Snapshots(Path(recipe.run.dir) / recipe.run.name / FOLDER, say).newest()
    if snapshot is None:
        return None
    then = progress_of(snapshot)
    errors = model_errors(snapshot, recipe)
    if then.data != prompts.fingerprint:
        problem = f"its rows, or the weights of its files, have changed since {snapshot.folder} was written"
        hint = (
            "use the files, weights and data.overlong that the run began with, or another run.name"
        )
        errors.append(UserError("data.train", problem, hint))
    if then.seed != recipe.run.seed:
        problem = f"{recipe.run.seed} shuffles the data differently from {then.seed}, the seed of {snapshot.folder}"
        hint = f"set it to {then.seed}, or choose another run.name"
        errors.append(UserError("run.seed", problem, hint))
    if recipe.train.mtp_loss and not then.trains_mtp:
        problem = (
            f"{recipe.train.mtp_loss}, but in {snapshot.folder} those layers were frozen"
            " and have no optimizer state"
        )
        hint = "set it to 0, or choose another run.name"
        errors.append(UserError("train.mtp_loss", problem, hint))
    if recipe.train.optimizer_name != then.optimizer:
        problem = f"{recipe.train.optimizer_name}, and {snapshot.folder} has the state of {then.optimizer}"
        hint = f"set it to {then.optimizer}, or choose another run.name"
        errors.append(UserError("train.optimizer_name", problem, hint))
    errors += _critic_errors(snapshot, then, recipe) + _buffer_errors(snapshot, then, recipe)
    if errors:
        raise UserErrors(errors)
    return snapshot


def progress_of(snapshot: Snapshot) -> Progress:
    """What the controller stored.

    Raises UserErrors where a version of megarl wrote it whose format is not read, or somebody changed it.
    """
    run = {_EARLIER_NAMES.get(key, key): value for key, value in snapshot.run.items()}
    its_format = run.setdefault("format", 1)
    if type(its_format) is int and not OLDEST_FORMAT <= its_format <= FORMAT:
        ours = f"this version reads {OLDEST_FORMAT} to {FORMAT}"
        raise _unfit(snapshot, f"is a checkpoint of format {its_format}, and {ours}")
    progress = _stored(snapshot, Progress, run)
    if progress.step != snapshot.step:
        raise _unfit(
            snapshot,
            f"is of step {snapshot.step} by its manifest, and of step {progress.step} by its state",
        )
    return progress


def _stored(snapshot: Snapshot, kind: type[State], stored: Mapping[str, Any]) -> State:
    """A dataclass from the object of JSON that it was stored as. Raises UserErrors as `progress_of` does."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(stored))
    except ValidationError as error:
        faults = error.errors()
    if any(fault["type"] in _OF_ANOTHER_VERSION for fault in faults):
        raise _unfit(snapshot, "was written by another version of megarl")
    value = json.dumps(faults[0]["input"])
    name = ".".join(map(str, faults[0]["loc"]))
    raise _unfit(snapshot, f"has {value:.40} as {name} in its state")


def _unfit(snapshot: Snapshot, problem: str) -> UserErrors:
    hint = "use the version of megarl that wrote it, or another run"
    return UserErrors([UserError(str(snapshot.folder), problem, hint)])


@listed
def _buffer_errors(snapshot: Snapshot, then: Progress, recipe: Recipe) -> ErrorIterator:
    """The errors of a buffer in a file format of another version, or whose groups cannot go on under the recipe."""
    buffer = _stored(snapshot, BufferState, then.buffer)
    if not buffer.streams:
        return
    if buffer_file(snapshot.folder).exists():
        try:
            open_samples(buffer_file(snapshot.folder))
        except UserError as error:
            hint = "resume with the version that wrote it, or choose another run.name"
            yield UserError(error.where, error.problem, hint)
    now = sampling_keys(recipe)
    if buffer.has_open:
        keys = tuple(now)
        waiting = "responses that have not ended"
    else:
        keys = _COMPLETE_GROUP_KEYS
        waiting = "groups that were not trained on"
    for key in keys:
        before = then.sampling.get(key)
        if _meaning(key, before) == _meaning(key, now[key]):
            continue
        written = _written(before)
        problem = (
            f"{_written(now[key])}, and {snapshot.folder} has {waiting}, of a run with {written}"
        )
        yield UserError(key, problem, f"set it to {written}, or choose another run.name")


def sampling_keys(recipe: Recipe) -> JsonObject:
    """By recipe key, what the open groups of a buffer depend on: their samples, and how old their tokens become.

    How old those of complete groups become is computed from the groups (`RolloutBuffer.after_loading`).
    """
    rollout = recipe.rollout
    algorithm = recipe.algorithm
    hyperparameters = hyperparameters_of(algorithm.name, algorithm)
    keys = {f"rollout.{key}": getattr(rollout, key) for key in _OF_ROLLOUT}
    keys |= {
        "rollout.prompts_in_flight": rollout.in_flight,
        "algorithm.name": algorithm.name,
        "algorithm.dynamic_sampling": hyperparameters.dynamic_sampling,
        "algorithm.oversample": None,
        "train.replay": recipe.train.replay,
    }
    if hyperparameters.dynamic_sampling:
        keys["algorithm.oversample"] = hyperparameters.oversample
    episode = recipe.episode.model_dump(mode="json") if recipe.episode else {}
    return keys | {f"episode.{key}": episode.get(key) for key in _OF_EPISODE}


def _meaning(key: str, value: Any) -> Any:
    """What of a key's value the samples depend on: greedy samples in the groups, the engine's experts, or all of it."""
    if key == "algorithm.name":
        return value in ALGORITHMS and ALGORITHMS[value].greedy_baseline
    if key == "train.replay":
        return value == "r3"
    return value


def _written(value: object) -> str:
    """As in a recipe."""
    if not isinstance(value, str):
        return json.dumps(value)
    return value


def critic_of(roles: Roles) -> JsonObject | None:
    """The critic's shape and whether it has adapters, as `Progress` has them."""
    critic = roles.critic
    if critic is None:
        return None
    return {"shape": asdict(critic.shape), "shares_weights": critic.shares_weights}


def _critic_errors(snapshot: Snapshot, then: Progress, recipe: Recipe) -> list[UserError]:
    now = critic_of(resolve(recipe))
    if now is None:
        return []
    hint = "choose another run.name"
    if then.critic is None:
        problem = (
            f"{recipe.algorithm.name} has a critic, and {snapshot.folder} was written without one"
        )
        return [UserError("algorithm.name", problem, hint)]
    if _with_defaults(then.critic.get("shape") or {}, now["shape"]) != now["shape"]:
        problem = f"{snapshot.folder} was written with a critic of another architecture"
        return [UserError("critic.path", problem, f"{_SAME_MODEL}, or another run.name")]
    before = then.critic.get("shares_weights", False)
    if before != now["shares_weights"]:
        problem = f"{snapshot.folder} was written with {_written(before)}"
        return [UserError("critic.shares_weights", problem, f"set it as it was, or {hint}")]
    return []


def model_errors(snapshot: Snapshot, recipe: Recipe) -> list[UserError]:
    """Where the weights of a checkpoint do not fit the recipe's model.

    Raises UserErrors where another version of megarl wrote it, or somebody changed it.
    """
    then = progress_of(snapshot)
    shape = asdict(model_shape(recipe.model.path, recipe.model.family))
    known = _with_defaults(then.shape, shape)
    errors = []
    for key, value in model_keys(recipe).items():
        before = then.model.get(key, value)
        if before == value:
            continue
        problem = f"{_written(value)}, and {snapshot.folder} was written with {_written(before)}"
        hint = f"set it to {_written(before)}, or choose another run.name"
        errors.append(UserError(key, problem, hint))
        if key == "model.family":  # the shape has its name
            known["family"] = shape["family"]
    if known == shape:
        return errors + _adapter_errors(snapshot, then, recipe)
    key = next(name for name in shape if known.get(name) != shape[name])
    problem = (
        f"{snapshot.folder} is of a model with {key} {known.get(key)}, this one has {shape[key]}"
    )
    return [*errors, UserError("model.path", problem, f"{_SAME_MODEL}, or another run.name")]


def model_keys(recipe: Recipe) -> JsonObject:
    """By recipe key, what the model computes with its weights, beside its files, as `Progress` has it."""
    return {"model.family": recipe.model.family, "model.rope_scaling": recipe.model.rope_values}


def adapter_identity(recipe: Recipe) -> JsonObject | None:
    """What a checkpoint of adapters fits, as `Progress` has it: their recipe keys, and the frozen weights.

    The rank in experts is the number that a default of the recipe means.
    """
    if recipe.lora is None:
        return None
    size = lora_size(recipe.lora, model_shape(recipe.model.path, recipe.model.family))
    assert size
    keys = recipe.lora.model_dump(mode="json", exclude={"path", "rounding", "sync"})
    keys |= {"targets": sorted(size.targets), "experts": size.expert_rank}
    return {
        **{f"lora.{key}": value for key, value in keys.items()},
        "base": fingerprint(recipe.model.path),
    }


def _adapter_errors(snapshot: Snapshot, then: Progress, recipe: Recipe) -> list[UserError]:
    now = adapter_identity(recipe)
    other_run = "or choose another run.name"
    if now is None and then.lora is None:
        return []
    if now is None:
        problem = f"{snapshot.folder} has adapters alone"
        return [UserError("lora", problem, f"set it as then, {other_run}")]
    if then.lora is None:
        problem = f"{snapshot.folder} has all weights"
        return [UserError("lora", problem, f"leave lora out, {other_run}")]
    changed = {key: value for key, value in now.items() if value != then.lora.get(key)}
    if recipe.lora and recipe.lora.experts is None and "lora.rank" in changed:
        changed.pop("lora.experts", None)  # it follows from the rank
    errors = []
    if changed.pop("base", None):
        problem = f"its weights are not those to which the adapters of {snapshot.folder} belong"
        errors = [UserError("model.path", problem, "use the checkpoint that the run began with")]
    for key, value in changed.items():
        before = _written(then.lora.get(key))
        problem = f"{_written(value)}, and {snapshot.folder} was written with {before}"
        errors.append(UserError(key, problem, f"set it to {before}, {other_run}"))
    return errors


def _with_defaults(stored: dict[str, object], now: dict[str, object]) -> dict[str, object]:
    """A checkpoint's shape, without fields that are gone, and with those that are newer than the checkpoint.

    They have their defaults; the family is that of the run.
    """
    defaults = {each.name: each.default for each in fields(ModelShape)}
    defaults["family"] = now["family"]
    known = {name: value for name, value in stored.items() if name in now}
    return {name: value for name, value in defaults.items() if value is not MISSING} | known


def resume(snapshot: Snapshot, recipe: Recipe, fleet: Fleet, prompts: PromptStream) -> GroupBuffer:
    """Load a checkpoint into the ranks and move the data on to where it was; the buffer, with its prompts' own rows.

    Raises UserError where these are not the rows of the buffer's groups.
    """
    then = progress_of(snapshot)
    groups = fleet.resume(snapshot.folder, then.version, then.attempts)
    state = _stored(snapshot, BufferState, then.buffer)
    numbers = [int(number) for number in state.streams]
    lowest = min(numbers, default=state.next_number)
    num_again = state.next_number - lowest
    prompts.skip_to(then.prompts_taken - num_again)
    prompts_again = prompts.take(num_again)
    entries = []
    for number, (prompt_id, summary, ref) in zip(numbers, groups, strict=True):
        prompt = prompts_again[number - lowest]
        if prompt.id != prompt_id:
            problem = f"{snapshot.folder} has samples of {prompt_id}, and the data has {prompt.id} in its place"
            hint = "use the files that the run began with, or another run.name"
            raise UserError("data.train", problem, hint)
        stream = tuple(state.streams[str(number)])
        entries.append(Entry(number, prompt, stream, summary, ref))
    buffer = GroupBuffer(
        entries=tuple(entries),
        next_number=state.next_number,
        trained=int(state.trained, 16),
        dropped=int(state.dropped, 16),
        surplus=state.surplus,
    )
    buffer.check()
    return buffer.after_loading(then.version + 1, recipe.rollout.prompts_per_step)
