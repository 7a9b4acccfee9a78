"""Samples of one row, as an engine's responses are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.samples.parquet import open_samples
from megarl.types import Prompt, Row, RowSummary, Sample, SampleGroup, SamplePart, UserError


def response(
    prompt_ids: Sequence[int],
    response_ids_T: np.ndarray,
    engine_logp_T: np.ndarray | None = None,
    text: str = "",
    *,
    finished: bool = True,
    version: int = 0,
    parts: tuple[SamplePart, ...] | None = None,
    routed_experts: np.ndarray | None = None,
    **of_sample: Any,
) -> Sample:
    """A sample of which the model sampled every token; by default with logprobs of 0 and of one version."""
    if engine_logp_T is None:
        engine_logp_T = np.zeros(len(response_ids_T), np.float32)
    if parts is None:
        parts = (SamplePart(version, len(response_ids_T)),) if len(response_ids_T) else ()
    row = Row.response(prompt_ids, response_ids_T, engine_logp_T, parts, routed_experts)
    return Sample((row,), text, finished, **of_sample)


def random_group(rng: np.random.Generator, vocab_size: int, lengths: Sequence[int]) -> SampleGroup:
    """Responses of these lengths to a prompt of five tokens, all drawn at random, with an engine's logprobs of -4."""
    responses = [rng.integers(0, vocab_size, length) for length in lengths]
    prompt = Prompt("", "", tuple(rng.integers(0, vocab_size, 5).tolist()), "")
    samples = tuple(
        response(prompt.token_ids, ids_T, np.full(len(ids_T), -4.0, np.float32))
        for ids_T in responses
    )
    nothing = np.zeros(len(samples), np.float32)
    return SampleGroup(prompt, samples, nothing, nothing > 0)


def with_row(sample: Sample, **changes: Any) -> Sample:
    """The sample with a row that is changed so."""
    return replace(sample, rows=(replace(sample.only_row, **changes),))


def response_rows(
    prompt_tokens: int, parts_G: Sequence[tuple[SamplePart, ...]]
) -> tuple[tuple[RowSummary, ...], ...]:
    """What a `GroupSummary` has of responses with these parts."""
    lengths = [sum(part.num_tokens for part in parts) for parts in parts_G]
    return tuple(
        (RowSummary(prompt_tokens + length, length, length, parts, has_group_prompt=True),)
        for length, parts in zip(lengths, parts_G, strict=True)
    )


def refusal(path: Path, change: Callable[[list[Any]], None], says: str) -> str:
    """Why a file of samples is refused after its first step's rows were changed by another program."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(UserError, match=says) as caught:
        open_samples(path).groups(1)
    return caught.value.problem
