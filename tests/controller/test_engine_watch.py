"""Which engine a row counts for, and how an engine that differs is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.controller.engine_watch import EngineWatch
from megarl.training.row_diffs import RowDiffs
from megarl.types import GroupSummary, SamplePart, SilentFault
from tests.samples.responses import response_rows

LARGEST = "rollout/logprob_diff_engine_max"
SAMPLES = 3


def group(*parts_G: tuple[SamplePart, ...]) -> GroupSummary:
    nothing = np.zeros(len(parts_G), np.float32)
    return GroupSummary(
        "", "", ("",) * len(parts_G), response_rows(2, parts_G), nothing == 0, nothing, nothing > 0
    )


def step(diffs_by_group: list[float], engines: list[int], version: int = 1) -> tuple[Any, RowDiffs]:
    """Groups, each of which one engine has sampled, whose rows all have the same difference."""
    groups = [group(*[(SamplePart(version, 4, engine),)] * SAMPLES) for engine in engines]
    keys = [(number, sample, 0) for number in range(len(groups)) for sample in range(SAMPLES)]
    diffs = np.repeat(np.array(diffs_by_group, np.float32), SAMPLES)
    return groups, RowDiffs(np.array(keys), diffs)


def test_the_largest_mean_of_an_engine_is_published() -> None:
    groups, rows = step([1e-3, 3e-3, 2e-3, 2.5e-3], [0, 0, 1, 1])
    assert EngineWatch().look(groups, rows, version=1) == {LARGEST: pytest.approx(2.25e-3)}


def test_one_engine_is_not_compared() -> None:
    groups, rows = step([1e-3, 3e-3], [2, 2])
    assert EngineWatch().look(groups, rows, version=1) == {}
    assert EngineWatch().look(groups, RowDiffs.joined([]), version=1) == {}


def test_an_engine_whose_differences_are_large_is_named_in_a_few_steps() -> None:
    rng = np.random.default_rng(3)
    watch = EngineWatch()
    engines = [number % 4 for number in range(64)]
    for number in range(1, 30):
        diffs = rng.lognormal(-7, 1, 64)
        watch.look(*step(diffs.tolist(), engines, number), version=number)
    diffs = rng.lognormal(-7, 1, 64) * np.where(np.arange(64) % 4 == 2, 1000.0, 1.0)
    with pytest.raises(SilentFault) as caught:
        for number in range(30, 33):
            watch.look(*step(diffs.tolist(), engines, number), version=number)
    assert [member.number for member in caught.value.members] == [2]
    assert caught.value.kind == "engine"
    assert str(caught.value).startswith("engine 2 gave log-probabilities that differ from the")
    watch.look(*step(rng.lognormal(-7, 1, 64).tolist(), engines, 33), version=33)


def test_rows_of_several_engines_and_of_other_ages_are_left_out() -> None:
    groups = [
        group((SamplePart(5, 4, 0),)),
        group((SamplePart(5, 4, 1),)),
        group((SamplePart(4, 2, 0), SamplePart(5, 2, 1))),  # only the newest tokens count: of engine 1
        group((SamplePart(4, 4, 0),)),  # older than most
        group((SamplePart(5, 4),)),  # no engine is known
    ]  # fmt: skip
    keys = np.array([(number, 0, 0) for number in range(len(groups))])
    rows = RowDiffs(keys, np.array([1.0, 2.0, 4.0, 64.0, 64.0], np.float32))
    assert EngineWatch().look(groups, rows, version=5) == {LARGEST: 3.0}
    ahead = [
        group((SamplePart(5, 4, 0),)),
        group((SamplePart(5, 4, 1),)),
        group((SamplePart(4, 2, 0), SamplePart(5, 2, 1))),  # all of its tokens count, of both engines
    ]  # fmt: skip
    rows = RowDiffs(keys[:3], np.array([1.0, 2.0, 64.0], np.float32))
    assert EngineWatch().look(ahead, rows, version=6) == {LARGEST: 2.0}
