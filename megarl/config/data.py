"""What a run learns from: the files of prompts, and the reward functions for the responses to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from megarl.config.fields import (
    Branch,
    Count,
    FilePath,
    FolderName,
    Positive,
    Seconds,
    Text,
    Weight,
)
from megarl.types import WhenFailed, WhenOverlong

_PATH = {"type": "string", "minLength": 1, "format": "path"}


def or_path(schema: dict[str, Any]) -> None:
    """Let a JSON schema also take a path in the place of its value."""
    value = dict(schema)
    told = {key: value.pop(key) for key in ("description", "title") if key in value}
    schema.clear()
    schema.update(told, anyOf=[_PATH, value])


class DataFileConfig(Branch):
    """One JSONL or parquet file, written as a path or as a branch."""

    path: FilePath
    """The JSONL or parquet file."""
    prompt: Text | None = None
    """Column of the prompts in this file; null: `data.prompt`."""
    answer: Text | None = None
    """Column of the answers in this file; null: `data.answer`."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        or_path(handler.resolve_ref_schema(reference))
        return reference

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if isinstance(value, str) and value:
            return {"path": value}
        if isinstance(value, dict | DataFileConfig):
            return value
        raise PydanticCustomError(
            "data_file", "write a path, or a branch with path, prompt and answer"
        )


class TrainFileConfig(DataFileConfig):
    """A file of training prompts, written as a path or as a branch."""

    weight: Positive | None = None
    """Share of the prompts that are drawn from this file, relative to the other files'; null: files are one list,
    shuffled together."""


class DataConfig(Branch):
    """The files of prompts, and the names of their columns (docs/data.md).

    A column's name with a dot is the path of a value inside a column: `reward_model.ground_truth`.
    """

    train: Annotated[tuple[TrainFileConfig, ...], Field(strict=False, json_schema_extra=or_path)]
    """Training prompts: a path, or a list of files."""
    eval: Mapping[FolderName, DataFileConfig] = {}
    """Evaluation sets: a name of your own for each, and its file."""
    prompt: Text = "prompt"
    """Column of the prompts: text, or a list of chat messages."""
    answer: Text = "answer"
    """Column of the answers, which reward functions get."""
    messages: Text | None = None
    """Column of whole episodes after the prompt, from which supervised steps learn in place of the answers."""
    max_prompt_tokens: Count = 1024
    """The most tokens of a prompt, with the chat template."""
    overlong: WhenOverlong = "refuse"
    """What becomes of longer prompts: refuse starts nothing, drop leaves them out and counts them."""

    @field_validator("train", mode="before")
    @classmethod
    def _train_files(cls, value: Any) -> Any:
        if isinstance(value, str) and value:
            return [value]
        if isinstance(value, list | tuple) and value:
            return value
        raise PydanticCustomError(
            "data_files", "write a path, or a list of files with path and weight"
        )

    @property
    def files(self) -> dict[str, DataFileConfig]:
        """Every file by its recipe key: `data.train` (`data.train.N` where there are several), `data.eval.NAME`."""
        return {
            **self.train_files,
            **{f"data.eval.{name}": file for name, file in self.eval.items()},
        }

    @property
    def train_files(self) -> dict[str, TrainFileConfig]:
        """The training files by recipe key."""
        if len(self.train) == 1:
            return {"data.train": self.train[0]}
        return {f"data.train.{number}": file for number, file in enumerate(self.train)}


class SourceRewardConfig(Branch):
    """The reward function for the rows of one source."""

    function: Text
    """Function that scores a response of this source, as `module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class RewardConfig(Branch):
    """What scores a response, in processes with limits of time and memory (docs/rewards.md)."""

    function: Text | None = None
    """Function that scores a response, as `module:function`; its module may lie in the folder where the command is
    started; null where `reward.by_source` or an environment scores all."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    source: Text = "data_source"
    """Column that names a row's source, for `reward.by_source` and for `source` in `samples.jsonl`."""
    by_source: Mapping[Text, SourceRewardConfig] = {}
    """Functions for the rows of named sources; all other rows are scored by `reward.function`."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes of each function for every engine."""
    timeout_s: Seconds = 5.0
    """Seconds that one reward may take; loading the function may take `run.timeout_s`."""
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
    """Memory of a reward's process in MB (2^20 bytes), beyond what loading the function takes."""
    on_failure: WhenFailed = "drop"
    """What a failed reward does: its sample leaves the group, the run stops, or the reward is `reward.penalty`."""
    penalty: Weight = 0.0
    """Reward of a sample whose reward failed, with `reward.on_failure: penalise`."""
