"""Demonstrations for supervised steps: the data's answers, or whole conversations of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from megarl.data.files import BadRow, column
from megarl.episodes.demonstrated_episode import demonstrate
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.types import (
    Prompt,
    Row,
    Sample,
    SampleGroup,
    SamplePart,
    UserError,
)


def demonstrations(
    tokenizer: Any, turn_tokenizer: TurnTokenizer | None, messages: str | None
) -> Callable[[Prompt], SampleGroup]:
    """What makes the demonstration of a prompt's row.

    turn_tokenizer: of the recipe's episodes. messages: the column of demonstrated episodes; without both it is the
    answer.
    """
    if turn_tokenizer is not None and messages:
        return partial(demonstrated_episode, turn_tokenizer=turn_tokenizer, name=messages)
    return partial(demonstration, tokenizer=tokenizer)


def demonstrated_episode(prompt: Prompt, turn_tokenizer: TurnTokenizer, name: str) -> SampleGroup:
    """The episode in the row's column `name` as a group of one sample. Raises UserError(data.messages)."""
    try:
        episode = demonstrate(
            turn_tokenizer,
            prompt.messages,
            column(prompt.row, name, "set data.messages to one of {columns}"),
        )
    except BadRow as bad:
        raise UserError("data.messages", f"{prompt.id}: {bad.problem}", bad.hint) from bad
    prompt_ids: Sequence[int] = episode.prompt_ids
    if prompt_ids == list(prompt.token_ids):
        prompt_ids = prompt.token_ids
    return _demonstrated(prompt, prompt_ids, episode.response_ids, episode.sampled, episode.text)


def demonstration(prompt: Prompt, tokenizer: Any) -> SampleGroup:
    """The data's answer as a group of one sample, for supervised steps; the engine's logprobs are 0."""
    response_ids = [
        *tokenizer(prompt.answer, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    sampled = [True] * len(response_ids)
    return _demonstrated(prompt, prompt.token_ids, response_ids, sampled, prompt.answer)


def _demonstrated(
    prompt: Prompt,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    sampled: Sequence[bool],
    text: str,
) -> SampleGroup:
    """The group of one sample, whose reward is 1 and whose logprobs are 0."""
    num_tokens = len(response_ids)
    row = Row(
        prompt_ids,
        np.asarray(response_ids, dtype=np.int64),
        engine_logp_T=np.zeros(num_tokens, np.float32),
        trained_T=np.asarray(sampled, dtype=np.bool_),
        parts=(SamplePart(0, num_tokens),),
    )
    sample = Sample((row,), text, finished=True)
    return SampleGroup(prompt, (sample,), np.ones(1, dtype=np.float32), np.ones(1, dtype=np.bool_))
