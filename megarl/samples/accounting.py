"""Which tokens of an episode the model sampled, row by row, and whether the account of them is right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

import numpy as np

from megarl.types import EpisodeRow, FloatArray, Prompt, RowSummary, Sample, SamplePart
from megarl.types.episodes import DropReason


def row_summaries(prompt: Prompt, sample: Sample) -> tuple[RowSummary, ...]:
    """The lengths of each row of a sample, and the parts of its trained tokens."""
    return tuple(
        RowSummary(
            row_length(prompt, row), len(row.response_ids_T), row.num_trained, trained_parts([row])
        )
        for row in sample.rows
    )


def row_length(prompt: Prompt, row: EpisodeRow) -> int:
    """The tokens of prompt and response; prompt: the group's."""
    return len(prompt.token_ids if row.prompt_ids is None else row.prompt_ids) + len(
        row.response_ids_T
    )


def longest_row(prompt: Prompt, sample: Sample) -> int:
    """The tokens of prompt and response of the sample's longest row."""
    return max(row_length(prompt, row) for row in sample.rows)


def trained_parts(rows: Sequence[EpisodeRow]) -> tuple[SamplePart, ...]:
    """The parts of all tokens of these rows that the model sampled, by ascending versions."""
    if len(rows) == 1 and rows[0].trained_T is None:
        return rows[0].parts
    counts: dict[int, int] = {}
    for row in rows:
        for part, count in zip(row.parts, _trained_by_part(row), strict=True):
            counts[part.version] = counts.get(part.version, 0) + count
    return tuple(SamplePart(version, count) for version, count in sorted(counts.items()) if count)


def _trained_by_part(row: EpisodeRow) -> list[int]:
    sizes = [part.num_tokens for part in row.parts]
    if row.trained_T is None or not sizes:
        return sizes
    return np.add.reduceat(row.trained_T.astype(np.int64), np.cumsum([0, *sizes[:-1]])).tolist()


def turn_rewards(samples: Sequence[Sample]) -> FloatArray | None:
    """The sum of the rewards of each sample's turns; None where there are none."""
    given = [
        [row.token_rewards_T for row in sample.rows if row.token_rewards_T is not None]
        for sample in samples
    ]
    if not any(given):
        return None
    return np.array(
        [sum(float(rewards_T.sum()) for rewards_T in of_sample) for of_sample in given], np.float32
    )


def check(prompt: Prompt, samples: Sequence[Sample]) -> None:
    """Raises RuntimeError where the tokens of a sample do not add up, see `sample_error`."""
    for number, sample in enumerate(samples):
        if error := sample_error(prompt, sample):
            raise RuntimeError(f"{prompt.id}: sample {number} {error}")


def sample_error(prompt: Prompt, sample: Sample) -> str | None:
    """A description of what is wrong with the account of an episode's tokens, else None.

    Each row's arrays have one value a token, its parts have all of its tokens, and tokens that the model did not sample
    have no logprob and no reward. An ended row ends with a token that the model sampled. The trained tokens of all rows
    are those that the engine sampled without those that were dropped, for whatever reason.
    """
    facts = sample.facts
    opened = sample.open_episode
    if sample.is_plain and facts is None and opened is None and sample.token_rewards_T is None:
        return None
    for number, row in enumerate(sample.rows):
        if error := _row_error(row, row_length(prompt, row), sample.is_open):
            return f"has a row {number} with {error}"
    if facts:
        account = asdict(facts)
    elif opened:
        account = opened.account
    else:
        account = {}
    sampled = account.get("sampled_tokens", 0)
    dropped = {reason: account.get(f"dropped_{reason}", 0) for reason in get_args(DropReason)}
    if account and sample.num_trained != sampled - sum(dropped.values()):
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        counted = f"{sampled} tokens that the engine sampled, of which {sum(dropped.values())} were dropped ({reasons})"
        return f"has {sample.num_trained} tokens to train on, and {counted}"
    return None


def _row_error(row: EpisodeRow, length: int, is_open: bool) -> str | None:
    tokens = len(row.response_ids_T)
    arrays = {
        "logprobs": row.engine_logp_T,
        "marks of trained tokens": row.trained_T,
        "rewards": row.token_rewards_T,
    }
    for what, array_T in arrays.items():
        if array_T is not None and len(array_T) != tokens:
            return f"{tokens} tokens and {len(array_T)} {what}"
    if (of_parts := sum(part.num_tokens for part in row.parts)) != tokens:
        return f"{tokens} tokens and parts of {of_parts}"
    if row.routed_experts is not None and len(row.routed_experts) != length - 1:
        return (
            f"{length} tokens of prompt and response, and the experts of {len(row.routed_experts)}"
        )
    if row.trained_T is None:
        return None
    if tokens and not is_open and not row.trained_T[-1]:
        return "tokens after the last that the model sampled"
    for what, array_T in {"a logprob": row.engine_logp_T, "a reward": row.token_rewards_T}.items():
        if array_T is not None and array_T[~row.trained_T].any():
            return f"{what} of a token that the model did not sample"
    return None
