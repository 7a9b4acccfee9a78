"""How far the engine is from the trainer in log-probabilities: by row, by version, and by token of samples in a file.

Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.algos.ratios import LOG_RATIO_BOUND
from megarl.config import Recipe
from megarl.types import FloatArray, IntArray, Row, SampleGroup, TrainSequence
from megarl.types.arrays import TokenArrays
from megarl.types.json_objects import JsonObject

RowKey = tuple[int, int, int]  # numbers of group, sample and row in the step


@dataclass(frozen=True)
class RowDiffs:
    """keys [N, 3]: `RowKey` of each row. diffs [N]: the mean of |engine - trainer| logprob.

    The mean is over the tokens that the policy itself sampled, or where there are none over all that were sampled.
    by_version: the sum of |engine - trainer| and the number of tokens that each version of the weights sampled.
    shown: the first tokens of some responses, as `shown_tokens`.
    """

    keys: IntArray
    diffs: FloatArray
    by_version: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    shown: Mapping[RowKey, JsonObject] = field(default_factory=dict)

    @staticmethod
    def joined(parts: Sequence[RowDiffs]) -> RowDiffs:
        """Those of several updates or ranks."""
        keys = [part.keys for part in parts]
        diffs = [part.diffs for part in parts]
        sums: dict[int, tuple[float, int]] = {}
        for part in parts:
            sums = _added(sums, part.by_version)
        return RowDiffs(
            np.concatenate([np.zeros((0, 3), np.int64), *keys]),
            np.concatenate([np.zeros(0, np.float32), *diffs]),
            sums,
            {key: tokens for part in parts for key, tokens in part.shown.items()},
        )

    def by_age(self, version: int) -> dict[int, float]:
        """The mean of |engine - trainer| logprob of the tokens that weights of so many versions before sampled."""
        return {
            version - sampled: total / count
            for sampled, (total, count) in sorted(self.by_version.items(), reverse=True)
        }


class ShownSamples:
    """The samples whose tokens a run's file of samples shows: about those that `pick_samples` chooses."""

    def __init__(self, recipe: Recipe) -> None:
        self._groups = recipe.run.sample_log_count
        self._per_group = recipe.samples_logged_of_a_group
        self.most_tokens = recipe.run.sample_log_tokens

    def has(self, key: RowKey) -> bool:
        group, sample, _ = key
        return bool(self.most_tokens) and group < self._groups and sample < self._per_group


def row_diffs(
    sequences: Sequence[TrainSequence],
    old_logp: TokenArrays,
    groups: Mapping[int, SampleGroup],
    shown: ShownSamples,
) -> RowDiffs:
    """Of the sequences of an update, which are rows of these groups.

    old_logp: by the policy before the step, an array for each, aligned like it.
    """
    keys: list[RowKey] = []
    diffs: list[float] = []
    by_version: dict[int, tuple[float, int]] = {}
    tokens: dict[RowKey, JsonObject] = {}
    for sequence, old_logp_T in zip(sequences, old_logp, strict=True):
        key = sequence.key
        if key is None or not sequence.sampled_T.any():
            continue
        group, sample, number = key
        row = groups[group].samples[sample].rows[number]
        diff_T = np.minimum(np.abs(old_logp_T - sequence.engine_logp_T), LOG_RATIO_BOUND)
        keys.append(key)
        diffs.append(float(diff_T[_counted_T(sequence)].mean()))
        response = slice(len(row.prompt_ids), None)
        by_version = _added(
            by_version, _sums_by_version(row, diff_T[response], sequence.sampled_T[response])
        )
        if shown.has(key):
            tokens[key] = shown_tokens(row, old_logp_T[response], shown.most_tokens)
    return RowDiffs(
        np.array(keys, np.int64).reshape(-1, 3), np.array(diffs, np.float32), by_version, tokens
    )


def shown_tokens(row: Row, trainer_logp_T: FloatArray, most_tokens: int) -> JsonObject:
    """The response's first tokens as plain lists for a file: their ids, log-probabilities, and whether sampled.

    parts: version and tokens of each, of the whole response. The log-probabilities are 0 where `trained` is 0.
    """
    first = slice(most_tokens)
    trained_T = row.trained_T[first]
    return {
        "token_ids": row.response_ids_T[first].tolist(),
        "engine_logp": _rounded(row.engine_logp_T[first] * trained_T),
        "trainer_logp": _rounded(trainer_logp_T[first] * trained_T),
        "trained": trained_T.astype(int).tolist(),
        "parts": [[part.version, part.num_tokens] for part in row.parts],
    }


def _counted_T(sequence: TrainSequence) -> np.ndarray:
    """Whether a token counts for its row's mean."""
    sampled_T = sequence.sampled_T
    if sequence.is_stale_T is None or sequence.is_stale_T[sampled_T].all():
        return sampled_T
    return sampled_T & ~sequence.is_stale_T


def _sums_by_version(
    row: Row, diff_T: FloatArray, sampled_T: np.ndarray
) -> dict[int, tuple[float, int]]:
    sums = {}
    for version, part in _parts(row):
        counted_T = sampled_T[part]
        if counted_T.any():
            sums[version] = float(diff_T[part][counted_T].sum()), int(counted_T.sum())
    return sums


def _parts(row: Row) -> Iterator[tuple[int, slice]]:
    """(version, its tokens in the response)."""
    end = 0
    for part in row.parts:
        begin = end
        end += part.num_tokens
        yield part.version, slice(begin, end)


def _added(
    sums: Mapping[int, tuple[float, int]], others: Mapping[int, tuple[float, int]]
) -> dict[int, tuple[float, int]]:
    added: defaultdict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0), sums)
    for version, (total, count) in others.items():
        before, count_before = added[version]
        added[version] = before + total, count_before + count
    return dict(added)


def _rounded(logp_T: FloatArray) -> list[float]:
    return [round(logp, 6) for logp in logp_T.tolist()]
