"""What a run reads from disk: the prompts that a recipe names, read and tokenised, and the faults of these files."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.config import Recipe
from megarl.config.data import DataConfig, DataFileConfig
from megarl.data.prompts import PromptFile, PromptSource, load_prompts
from megarl.data.streams import MixedStream, PromptStream
from megarl.data.tokens import ProgressBar, TokenCache, no_bar
from megarl.types import Metrics, Prompt, SampleGroup, UserError, UserErrors
from megarl.types.json_objects import ToolSchema


@dataclass(frozen=True)
class Inputs:
    """What a run reads from disk: an endless stream of training prompts, and each evaluation set, cut to its limit.

    demonstrate: the answer of a prompt's row, or its demonstrated episode, as a group of one sample for supervised
    steps. notes, metrics: lines about the data to print at the start, and its numbers for the record of step 0.
    """

    prompts: PromptStream
    eval_sets: Mapping[str, Sequence[Prompt]]
    demonstrate: Callable[[Prompt], SampleGroup]
    notes: Sequence[str] = ()
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class DataRead:
    """The files that could be read, by recipe key, and the faults of the others."""

    train: Mapping[str, PromptFile]
    eval_sets: Mapping[str, PromptFile]
    errors: list[UserError] = field(default_factory=list)

    @property
    def train_prompts(self) -> Sequence[Prompt]:
        return [prompt for file in self.train.values() for prompt in file.prompts]

    @property
    def notes(self) -> list[str]:
        """A line for each file from which prompts were dropped."""
        return [
            f"{file.source.where}: {file.num_dropped} of the {file.num_rows} prompts of {file.source.path} were dropped"
            f" because they are longer than data.max_prompt_tokens; the longest has {file.longest} tokens"
            for file in (*self.train.values(), *self.eval_sets.values())
            if file.num_dropped
        ]

    @property
    def metrics(self) -> Metrics:
        """For the record of step 0: the numbers of prompts kept and dropped, of training and of each evaluation set."""
        metrics: Metrics = {}
        sets = {"train": list(self.train.values())} | {
            f"eval/{name}": [file] for name, file in self.eval_sets.items()
        }
        for name, files in sets.items():
            metrics[f"data/{name}/prompts"] = float(sum(len(file.prompts) for file in files))
            metrics[f"data/{name}/dropped"] = float(sum(file.num_dropped for file in files))
        return metrics

    def stream(self, recipe: Recipe) -> PromptStream:
        """Prompts of the training files that were read (at least one): drawn by weight, or evenly from all rows."""
        weights = [recipe.data.train_files[where].weight for where in self.train]
        if len(weights) < 2 or None in weights:
            return PromptStream(self.train_prompts, recipe.run.seed)
        files = [file.prompts for file in self.train.values()]
        return MixedStream(files, [weight for weight in weights if weight], recipe.run.seed)


def read_data(
    recipe: Recipe,
    tokenizer: object,
    *,
    vocab_size: int | None = None,
    absent: Container[str] = (),
    tools: Sequence[ToolSchema] = (),
    cache: TokenCache | None = None,
    bar: ProgressBar = no_bar,
) -> DataRead:
    """Read every data file of the recipe whose key is not absent; the result has every fault of every file.

    vocab_size: the model's, or None where it is not known. tools, bar: as of `load_prompts`.
    """
    data = recipe.data
    errors = _weight_errors(recipe.data)
    read: dict[str, PromptFile] = {}
    for where, file in data.files.items():
        if where in absent:
            continue
        try:
            read[where] = load_prompts(
                _source(data, where, file),
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                vocab_size=vocab_size,
                overlong=data.overlong,
                tools=tools,
                cache=cache,
                bar=bar,
            )
        except UserErrors as several:
            errors += several.errors
            # the template: no file can be rendered
            if any(error.where == "model.path" for error in several.errors):
                break
    train = {where: read[where] for where in data.train_files if where in read}
    eval_sets = {
        name: read[f"data.eval.{name}"] for name in data.eval if f"data.eval.{name}" in read
    }
    return DataRead(train, eval_sets, errors)


def _source(data: DataConfig, where: str, file: DataFileConfig) -> PromptSource:
    """The file with its own columns, or with the columns of all files."""
    columns_by_key = {"prompt": file.prompt, "answer": file.answer}
    hints = {}
    for key, name in columns_by_key.items():
        hints[key] = f"set data.{key} to one of {{columns}}"
        if name:
            hints[key] = f"set {key} of {where} to one of {{columns}}"
        elif where != "data.train":
            hints[key] += (
                f", or for this file alone write {where} as {{path: {file.path}, {key}: COLUMN}}"
            )
    prompt = file.prompt or data.prompt
    answer = file.answer or data.answer
    return PromptSource(where, file.path, prompt, answer, hints["prompt"], hints["answer"])


def _weight_errors(data: DataConfig) -> list[UserError]:
    """Weights must be set for all training files or for none."""
    without = [where for where, file in data.train_files.items() if file.weight is None]
    if not without or len(without) == len(data.train):
        return []
    problem = f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no weight, and other files have"
    return [UserError("data.train", problem, "write a weight for every file, or for none")]
