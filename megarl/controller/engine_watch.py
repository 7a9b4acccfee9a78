"""Compares the engines of a run, step by step: how far the log-probabilities of each are from the trainer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.tracking.engine_band import EngineBand, Outlier
from megarl.training.row_diffs import RowDiffs
from megarl.types import (
    UNKNOWN_ENGINE,
    FaultMember,
    GroupSummary,
    Metrics,
    RowSummary,
    SilentFault,
    num_stale,
)


@dataclass(frozen=True)
class _EngineRow:
    """A row that one engine sampled, as far as it is counted. age: in versions, of its newest tokens."""

    engine: int
    age: int
    group: int
    diff: float


class EngineWatch:
    """What a run has seen of its engines; it is made with the run, and begins anew when the run resumes."""

    def __init__(self) -> None:
        self._band = EngineBand()

    def look(self, groups: Sequence[GroupSummary], rows: RowDiffs, version: int) -> Metrics:
        """The largest mean difference of an engine; {} where fewer than two engines can be compared.

        rows: that the step has trained on. version: of the policy. Rows of several engines are left out, and those
        whose tokens are older or newer than most rows': there the policies differ, too. Raises SilentFault for engines
        out of their band.
        """
        counted = _of_one_age(_engine_rows(groups, rows, version))
        by_engine: dict[int, dict[int, list[float]]] = {}
        for row in counted:
            of_engine = by_engine.setdefault(row.engine, {})
            of_engine.setdefault(row.group, []).append(row.diff)
        diffs = {
            engine: np.array([np.mean(of_group) for of_group in of_engine.values()], np.float32)
            for engine, of_engine in by_engine.items()
        }
        self._band, outliers = self._band.after(diffs)
        if outliers:
            raise _fault(outliers)
        if len(diffs) < 2:
            return {}
        largest = max(float(of_groups.mean()) for of_groups in diffs.values())
        return {"rollout/logprob_diff_engine_max": largest}


def _engine_rows(groups: Sequence[GroupSummary], rows: RowDiffs, version: int) -> list[_EngineRow]:
    """The rows whose counted tokens (see `RowDiffs`) one engine has sampled."""
    found = []
    for (group, sample, row), diff in zip(rows.keys.tolist(), rows.diffs.tolist(), strict=True):
        summary: RowSummary = groups[group].rows[sample][row]
        newest = summary.parts[-1]
        engines = {newest.engine}
        if num_stale(summary.parts, version) == summary.num_trained:  # no token is newer
            engines = {part.engine for part in summary.parts}
        if len(engines) == 1 and newest.engine != UNKNOWN_ENGINE:
            found.append(_EngineRow(newest.engine, version - newest.version, group, diff))
    return found


def _of_one_age(rows: Sequence[_EngineRow]) -> list[_EngineRow]:
    """The rows of the age that most have."""
    ages = Counter(row.age for row in rows)
    if not ages:
        return []
    ((age, _),) = ages.most_common(1)
    return [row for row in rows if row.age == age]


def _fault(outliers: Sequence[Outlier]) -> SilentFault:
    worst = max(outliers, key=lambda outlier: outlier.diff / outlier.peers_diff)
    what = (
        f"gave log-probabilities that differ from the trainer's by {worst.diff:.2g} a token, "
        f"those of other engines by {worst.peers_diff:.2g} (medians of the groups of prompts); "
        f"the band is up to {worst.band:.2g} times as much"
    )
    engines = [outlier.engine for outlier in outliers]
    return SilentFault(
        "engine", what, [FaultMember(number, f"engine {number}") for number in engines]
    )
