"""Episodes to learn from: drawn at random, as one row, and cut into several rows that hold the same turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.types import EpisodeFacts, Prompt, Row, Sample, SamplePart, with_part

VOCABULARY = 99


def episode(
    prompt: Prompt,
    rng: np.random.Generator,
    turns: int,
    *,
    longest: int = 4,
    version: int = 4,
    pays: bool = True,
) -> Sample:
    """An episode of one row: turns and observations of 1 to `longest` tokens, the first turns of older versions."""
    ids, logps, trained, rewards, parts = [], [], [], [], ()
    versions = np.sort(rng.integers(version - 2, version + 1, turns)).tolist()
    for turn, of_version in enumerate(versions):
        sampled, seen = (
            int(rng.integers(1, longest + 1)),
            int(rng.integers(1, longest + 1)) * (turn < turns - 1),
        )
        ids += rng.integers(0, VOCABULARY, sampled + seen).tolist()
        logps += [*(-rng.integers(1, 8, sampled) / 4).tolist(), *[0.0] * seen]
        trained += [True] * sampled + [False] * seen
        rewards += [0.0] * (sampled - 1) + [float(rng.integers(-2, 3)) / 4] + [0.0] * seen
        parts = with_part(parts, SamplePart(of_version, sampled + seen))
    row = Row(
        prompt.token_ids, np.array(ids), np.array(logps, np.float32), np.array(trained), parts,
        token_rewards_T=np.array(rewards, np.float32) if pays else None,
    )  # fmt: skip
    return sample_of([row])


def sample_of(rows: Sequence[Row], **more: Any) -> Sample:
    """A sample of these rows, with facts that are right."""
    sampled, turns = sum(row.num_trained for row in rows), sum(len(_turns(row)) for row in rows)
    facts = EpisodeFacts(turns, turns - 1, 0, 0.5, "answered", sampled)
    return Sample(tuple(rows), "", finished=True, **{"facts": facts, **more})


def cut(sample: Sample, before: Sequence[int]) -> Sample:
    """The same episode with a row that begins before each of these turns (from 1 on), as if history was rewritten.

    What stood before these turns is the prompt of the new row.
    """
    (row,) = sample.rows
    turns = _turns(row)
    bounds = [0, *sorted({turn for turn in before if 0 < turn < len(turns)}), len(turns)]
    all_ids = (*row.prompt_ids, *row.response_ids_T.tolist())
    versions_T = np.repeat(
        [part.version for part in row.parts], [part.num_tokens for part in row.parts]
    )
    rows = []
    for first, end in zip(bounds[:-1], bounds[1:], strict=True):
        span = slice(turns[first][0], turns[end - 1][1])
        parts: tuple[SamplePart, ...] = ()
        for version in versions_T[span].tolist():
            parts = with_part(parts, SamplePart(version, 1))
        rewards_T = row.token_rewards_T
        rows.append(
            Row(
                all_ids[: len(row.prompt_ids) + span.start] if first else row.prompt_ids,
                row.response_ids_T[span], row.engine_logp_T[span], row.trained_T[span], parts,
                token_rewards_T=None if rewards_T is None else rewards_T[span],
            )
        )  # fmt: skip
    return replace(
        sample_of(rows),
        facts=sample.facts,
        finished=sample.finished,
        is_baseline=sample.is_baseline,
    )


def _turns(row: Row) -> list[tuple[int, int]]:
    """Begin and end of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.pad(row.trained_T.astype(np.int64), 1)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
