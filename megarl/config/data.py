"""What a run learns from: the files of prompts, and the reward functions for the responses to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

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


class DataFileConfig(Branch):
    """One JSONL or parquet file, written as a path or as a branch; its columns are `data`'s unless they are set."""

    path: FilePath
    prompt: Text | None = None
    answer: Text | None = None

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
    """A file of training prompts; `weight` is its share of the prompts that are drawn, relative to the other files'."""

    weight: Positive | None = None


class DataConfig(Branch):
    """The prompts' files: `prompt` and `answer` name their columns, `eval` maps an evaluation set's name to its file.

    A column's name with a dot is the path of a value inside a column: `reward_model.ground_truth`. `train` is one file
    or a list of files; docs/data.md says how they are mixed. `overlong` says what becomes of prompts that are longer
    than `max_prompt_tokens`: they are refused before the run starts, or left out and counted. `messages` is the column
    of whole episodes after the prompt, from which supervised steps learn in place of the answers.
    """

    train: Annotated[tuple[TrainFileConfig, ...], Field(strict=False)]
    eval: Mapping[FolderName, DataFileConfig] = {}
    prompt: Text = "prompt"
    answer: Text = "answer"
    messages: Text | None = None
    max_prompt_tokens: Count = 1024
    overlong: WhenOverlong = "refuse"

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
    """The reward function for the rows of one source, `module:function`, and its keyword arguments."""

    function: Text
    arguments: dict[str, Any] = {}


class RewardConfig(Branch):
    """`module:function` that scores a response, with keyword arguments; `by_source` has functions for named sources.

    Every reward is computed in a process with limits of time and memory (docs/rewards.md). After a failed reward
    `on_failure` decides: the sample leaves the group, the run stops, or the reward is `penalty`.
    """

    function: Text | None = None
    arguments: dict[str, Any] = {}
    source: Text = "data_source"  # the column that names a row's source
    by_source: Mapping[Text, SourceRewardConfig] = {}
    workers: Annotated[int, Field(ge=1, le=1024)] = 2  # processes of each function for every engine
    timeout_s: Seconds = 5.0  # of one reward
    # of a reward, beyond what loading the function takes
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
    on_failure: WhenFailed = "drop"
    penalty: Weight = 0.0
