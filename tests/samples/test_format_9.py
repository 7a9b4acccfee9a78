"""Sample files of the format before, as megarl of 24 November 2026 wrote the recorded one."""

from __future__ import annotations

from dataclasses import astuple, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from megarl.samples import format_9
from megarl.samples.buffer import PartialGroup
from megarl.samples.parquet import open_samples, writing
from megarl.types import EpisodeFacts, EpisodeProgress, Prompt, Row, Sample, SamplePart, UserError
from megarl.types.reward_result import Failure, RewardResult

RECORDED = Path(__file__).parent / "recorded" / "format_9.parquet"
PROMPT = Prompt("row 1", "two\n\u00fcber", (1, 2, 3), "4", {"n": 1, "nested": [1.5, None]})
PLAIN = Sample(
    (
        Row.response(
            PROMPT.token_ids,
            np.array([4, 5, 6]),
            np.array([-0.1, -0.2, -0.3], np.float32),
            (SamplePart(1, 1), SamplePart(3, 2)),
            np.arange(20, dtype=np.uint8).reshape(5, 2, 2),
        ),
    ),
    "abc",
    finished=True,
    verifications=2,
    prefills=2,
)
EPISODE = Sample(
    (
        Row(
            PROMPT.token_ids,
            np.array([7, 8, 10]),
            np.array([-0.5, 0.0, -0.25], np.float32),
            np.array([True, False, True]),
            (SamplePart(3, 3),),
            token_rewards_T=np.array([0.25, 0.0, 0.0], np.float32),
        ),
        Row.response((1, 2, 7), np.array([9]), np.array([-0.75], np.float32), (SamplePart(3, 1),)),
    ),
    "x",
    finished=False,
    facts=EpisodeFacts(2, 1, 0, 0.5, "answered", 3, seed=11),
    transcript=({"role": "assistant", "text": "x", "calls": [], "reward": 0.25},),
)
OPEN = Sample(
    (
        Row.response(
            PROMPT.token_ids, np.array([5]), np.array([-1.0], np.float32), (SamplePart(3, 1),)
        ),
    ),
    "",
    finished=False,
    is_open=True,
    transcript=({"role": "assistant", "text": "t", "calls": [], "reward": 0.0},),
    open_episode=EpisodeProgress(
        phases=1,
        account={"sampled_tokens": 1, "turns": 1},
        following="turn",
        digests=("ab",),
        turn_tokens=1,
        said=(5,),
    ),
)


def comparable(value: Any) -> Any:
    """With arrays as their types and bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return comparable(astuple(value))
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    return value


def test_every_bit_of_a_recorded_file_is_read() -> None:
    samples = open_samples(RECORDED)
    assert (samples.vocab_size, samples.temperature, samples.num_samples) == (32, 0.7, (2, 3))
    (whole,) = samples.groups(1)
    assert whole.prompt == PROMPT
    assert comparable(whole.samples) == comparable((PLAIN, EPISODE))
    assert (whole.rewards_G.tolist(), whole.correct_G.tolist()) == ([1.0, 0.5], [True, False])
    _, partial = samples.buffered_groups()
    assert isinstance(partial, PartialGroup)
    assert comparable(partial.samples) == comparable((PLAIN, PLAIN, OPEN))
    assert partial.reward_results == (RewardResult(0.5, True, "7"), Failure("took too long"), None)


def test_it_is_written_in_todays_format(tmp_path: Path) -> None:
    groups = list(open_samples(RECORDED).buffered_groups())
    path = tmp_path / "buffer.parquet"
    with writing(path, 32, 0.7) as file:
        for group in groups:
            file.write([group])
    assert "rows" in pyarrow.parquet.read_schema(path).names
    again = list(open_samples(path).buffered_groups())
    assert comparable(tuple(group.samples for group in again)) == comparable(
        tuple(group.samples for group in groups)
    )


@pytest.mark.parametrize("name", ["response_ids", "engine_logp", "versions"])
def test_a_file_without_a_value_is_refused(tmp_path: Path, name: str) -> None:
    table = pyarrow.parquet.read_table(RECORDED).slice(0, 2)
    rows = table.to_pylist()
    rows[1][name] = None
    path = tmp_path / "samples.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(UserError, match=f"sample 1 of step 1 has a row without {name}"):
        open_samples(path).groups(1)


def test_a_file_that_lacks_a_column_is_refused(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(RECORDED).drop_columns(["transcript"])
    path = tmp_path / "samples.parquet"
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(UserError, match=f"its format is {format_9.FORMAT}"):
        open_samples(path)
