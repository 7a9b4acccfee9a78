"""How far the engine's log-probabilities are from the trainer's, in each row that a rank trains on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algos.ratios import LOG_RATIO_BOUND
from megarl.types import FloatArray, IntArray, TrainSequence
from megarl.types.arrays import TokenArrays


@dataclass(frozen=True)
class RowDiffs:
    """keys [N, 3]: numbers of group, sample and row in the step. diffs [N]: the mean of |engine - trainer| logprob.

    The mean is over the tokens that the policy itself sampled, or where there are none over all that were sampled.
    """

    keys: IntArray
    diffs: FloatArray

    @staticmethod
    def joined(parts: Sequence[RowDiffs]) -> RowDiffs:
        """Those of several updates or ranks."""
        keys = [part.keys for part in parts]
        diffs = [part.diffs for part in parts]
        return RowDiffs(
            np.concatenate([np.zeros((0, 3), np.int64), *keys]),
            np.concatenate([np.zeros(0, np.float32), *diffs]),
        )


def row_diffs(sequences: Sequence[TrainSequence], old_logp: TokenArrays) -> RowDiffs:
    """Of the sequences of an update. old_logp: by the policy before the step, an array for each, aligned like it."""
    keys = []
    diffs = []
    for sequence, old_logp_T in zip(sequences, old_logp, strict=True):
        counted_T = sequence.sampled_T
        if sequence.is_stale_T is not None and not sequence.is_stale_T[counted_T].all():
            counted_T = counted_T & ~sequence.is_stale_T
        if sequence.key is None or not counted_T.any():
            continue
        diff_T = np.abs(old_logp_T[counted_T] - sequence.engine_logp_T[counted_T])
        keys.append(sequence.key)
        diffs.append(np.minimum(diff_T, LOG_RATIO_BOUND).mean())
    return RowDiffs(np.array(keys, np.int64).reshape(-1, 3), np.array(diffs, np.float32))
