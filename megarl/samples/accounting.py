"""Which tokens of a sample the model sampled, row by row, and whether the account of them is right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import get_args

import numpy as np

from megarl.types import FloatArray, Prompt, Row, RowSummary, Sample, SamplePart
from megarl.types.episodes import DropReason


def row_summaries(sample: Sample, prompt: Prompt) -> tuple[RowSummary, ...]:
    """The lengths of each row of a sample of this prompt, and the parts of its trained tokens."""
    token_ids = tuple(prompt.token_ids)
    return tuple(
        RowSummary(
            length=row.num_tokens,
            response_length=len(row.response_ids_T),
            num_trained=row.num_trained,
            parts=trained_parts(row),
            has_group_prompt=tuple(row.prompt_ids) == token_ids,
        )
        for row in sample.rows
    )


def longest_row(sample: Sample) -> int:
    """The tokens of prompt and response of the sample's longest row."""
    return max(row.num_tokens for row in sample.rows)


def trained_parts(row: Row) -> tuple[SamplePart, ...]:
    """The parts of a row's tokens that the model sampled."""
    if row.trained_T.all():
        return row.parts
    starts = np.cumsum([0, *(part.num_tokens for part in row.parts[:-1])])
    counts = np.add.reduceat(row.trained_T.astype(np.int64), starts).tolist()
    pairs = zip(row.parts, counts, strict=True)
    return tuple(replace(part, num_tokens=count) for part, count in pairs if count)


def turn_rewards(samples: Sequence[Sample]) -> FloatArray | None:
    """The sum of the rewards of each sample's turns; None where there are none."""
    rewards = [
        [row.token_rewards_T for row in sample.rows if row.token_rewards_T is not None]
        for sample in samples
    ]
    if not any(rewards):
        return None
    return np.array(
        [sum(float(rewards_T.sum()) for rewards_T in of_sample) for of_sample in rewards],
        np.float32,
    )


def check(prompt: Prompt, samples: Sequence[Sample]) -> None:
    """Raises RuntimeError where the tokens of a sample do not add up, see `sample_error`."""
    for number, sample in enumerate(samples):
        if error := sample_error(sample):
            raise RuntimeError(f"{prompt.id}: sample {number} {error}")


def sample_error(sample: Sample) -> str | None:
    """A description of what is wrong with the account of a sample's tokens, else None.

    Each row's arrays have one value a token, its parts have all of its tokens, and tokens that the model did not sample
    have no logprob and no reward. An ended row ends with a token that the model sampled. The trained tokens of all rows
    of an episode are those that the engine sampled without those that were dropped, for whatever reason.
    """
    for number, row in enumerate(sample.rows):
        if error := _row_error(row, sample.is_open):
            return f"has a row {number} with {error}"
    if sample.facts:
        account = asdict(sample.facts)
    elif sample.open_episode:
        account = sample.open_episode.account
    else:
        return None
    sampled = account.get("sampled_tokens", 0)
    dropped = {reason: account.get(f"dropped_{reason}", 0) for reason in get_args(DropReason)}
    num_dropped = sum(dropped.values())
    if sample.num_trained == sampled - num_dropped:
        return None
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    return (
        f"has {sample.num_trained} tokens to train on, and {sampled} tokens that the engine sampled,"
        f" of which {num_dropped} were dropped ({reasons})"
    )


def _row_error(row: Row, is_open: bool) -> str | None:
    num_tokens = len(row.response_ids_T)
    arrays = {
        "logprobs": row.engine_logp_T,
        "marks of trained tokens": row.trained_T,
        "rewards": row.token_rewards_T,
    }
    for what, array_T in arrays.items():
        if array_T is not None and len(array_T) != num_tokens:
            return f"{num_tokens} tokens and {len(array_T)} {what}"
    if (of_parts := sum(part.num_tokens for part in row.parts)) != num_tokens:
        return f"{num_tokens} tokens and parts of {of_parts}"
    if row.routed_experts is not None and len(row.routed_experts) != row.num_tokens - 1:
        return (
            f"{row.num_tokens} tokens of prompt and response, "
            f"and the experts of {len(row.routed_experts)}"
        )
    if num_tokens and not is_open and not row.trained_T[-1]:
        return "tokens after the last that the model sampled"
    for what, array_T in {"a logprob": row.engine_logp_T, "a reward": row.token_rewards_T}.items():
        if array_T is not None and array_T[~row.trained_T].any():
            return f"{what} of a token that the model did not sample"
    return None
