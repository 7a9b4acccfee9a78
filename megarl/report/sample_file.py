"""The samples of a file of `megarl rollout`, token by token, and the load of the experts that its tokens chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megarl.config import Recipe
from megarl.printable import json_line
from megarl.report.run_files import MOST_SAMPLE_BYTES
from megarl.report.token_texts import TokenTexts
from megarl.samples.expert_load import ExpertLoad
from megarl.samples.parquet import open_samples
from megarl.samples.summaries import source_of
from megarl.types import Row, SampleGroup, episode_dict
from megarl.types.json_objects import JsonObject

_MOST_TOKENS = 2_000_000  # on a page; of further samples the text alone is shown
_THINNED_TO = (
    3  # one of so many samples is kept; odd, so that it is not always the same place in a group
)
_DIGITS = 4  # after the point of a log-probability


@dataclass
class FileSamples:
    """samples: as lines of samples.jsonl, and `rows` with each row's tokens.

    expert_load: of each layer with experts, the tokens of each expert over their mean; None: the file has no choices of
    experts.
    """

    samples: list[JsonObject] = field(default_factory=list)
    expert_load: list[list[float]] | None = None
    notes: list[str] = field(default_factory=list)


def file_samples(path: Path, recipe: Recipe) -> FileSamples:
    """The samples of a file; where their text is more than a browser takes, evenly chosen ones.

    recipe: of its run, for the tokenizer. Raises UserError for no or a damaged file.
    """
    file = open_samples(path)
    texts = TokenTexts(recipe.model.path)
    result = FileSamples(notes=texts.notes)
    load = ExpertLoad()
    shown = _BoundedSamples(MOST_SAMPLE_BYTES)
    num_tokens = 0
    for step in range(1, file.num_steps + 1):
        for number, group in enumerate(file.groups(step)):
            for index, sample in enumerate(group.samples):
                line = _line(step, number, group, index, recipe.reward.source)
                num_tokens += sum(len(row.response_ids_T) for row in sample.rows)
                is_kept = shown.add(line)
                if is_kept and num_tokens <= _MOST_TOKENS:
                    line["rows"] = [_tokens(row, texts) for row in sample.rows]
                _count_experts(load, sample.rows)
    result.samples = shown.samples()
    if shown.every > 1:
        result.notes.append(f"{path} is large: one of {shown.every} samples is shown")
    if num_tokens > _MOST_TOKENS:
        result.notes.append(
            f"{path} has {num_tokens:,} tokens: the first {_MOST_TOKENS:,} are shown"
        )
    result.expert_load = _shares(load)
    return result


class _BoundedSamples:
    """Evenly chosen samples whose lines have at most so many bytes together, without their tokens; at least one."""

    def __init__(self, most_bytes: int) -> None:
        self.every = 1
        self._most_bytes = most_bytes
        self._num_samples = 0
        self._kept: list[tuple[int, JsonObject]] = []  # bytes, sample
        self._num_bytes = 0

    def add(self, sample: JsonObject) -> bool:
        """Whether the sample is kept, which it is until a later one leaves no room for it."""
        number = self._num_samples
        self._num_samples += 1
        if number % self.every:
            return False
        num_bytes = len(json_line(sample).encode())
        self._kept.append((num_bytes, sample))
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes and len(self._kept) > 1:
            self.every *= _THINNED_TO
            self._kept = self._kept[::_THINNED_TO]
            self._num_bytes = sum(num_bytes for num_bytes, _ in self._kept)
        return number % self.every == 0

    def samples(self) -> list[JsonObject]:
        return [sample for _, sample in self._kept]


def _line(step: int, number: int, group: SampleGroup, index: int, source_column: str) -> JsonObject:
    sample = group.samples[index]
    parts = [part for row in sample.rows for part in row.parts]
    line: JsonObject = {
        "step": step,
        "group": number,
        "sample": index,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": sample.text,
        "reward": float(group.rewards_G[index]),
        "correct": bool(group.correct_G[index]),
        "length": sample.num_trained,
        "finished": sample.finished,
        "version": max((part.version for part in parts), default=-1),
    }
    if source := source_of(group.prompt.row, source_column):
        line["source"] = source
    if sample.facts:
        line |= episode_dict(sample.facts, sample.transcript)
    return line


def _tokens(row: Row, texts: TokenTexts) -> JsonObject:
    """tokens: their texts; logp: by the engine, 0 where trained (whether the model sampled it) is 0; parts: version and
    tokens of each."""
    return {
        "tokens": texts.of(row.response_ids_T.tolist()),
        "logp": [round(logp, _DIGITS) for logp in row.engine_logp_T.tolist()],
        "trained": row.trained_T.astype(int).tolist(),
        "parts": [[part.version, part.num_tokens] for part in row.parts],
    }


def _count_experts(load: ExpertLoad, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.routed_experts is not None:
            load.add(row.routed_experts)


def _shares(load: ExpertLoad) -> list[list[float]] | None:
    """The tokens of each expert over their mean, by layer."""
    counts_LE = load.counts_LE
    if not counts_LE.size:
        return None
    mean = counts_LE.mean(axis=1, keepdims=True)
    return np.round(counts_LE / np.maximum(mean, 1e-9), _DIGITS).tolist()
