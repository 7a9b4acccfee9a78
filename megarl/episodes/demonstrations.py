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
    BoolArray,
    IntArray,
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

    splice: of the recipe's episodes. messages: the column of demonstrated episodes; without both it is the answer.
    """
    if turn_tokenizer is not None and messages:
        return partial(demonstrated_episode, turn_tokenizer=turn_tokenizer, name=messages)
    return partial(demonstration, tokenizer=tokenizer)


def demonstrated_episode(prompt: Prompt, turn_tokenizer: TurnTokenizer, name: str) -> SampleGroup:
    """The episode in the row's column `name` as a group of one sample. Raises UserError(data.messages)."""
    try:
        found = demonstrate(
            turn_tokenizer,
            prompt.messages,
            column(prompt.row, name, "set data.messages to one of {columns}"),
        )
    except BadRow as bad:
        raise UserError("data.messages", f"{prompt.id}: {bad.problem}", bad.hint) from bad
    marks = [False] * len(found.prompt_ids) + found.sampled
    return demonstrated_conversation(
        prompt, [*found.prompt_ids, *found.response_ids], marks, found.text
    )


def demonstration(prompt: Prompt, tokenizer: Any) -> SampleGroup:
    """The data's answer as a group of one sample, for supervised steps; the engine's logprobs are 0."""
    token_ids = [
        *tokenizer(prompt.answer, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    response_ids_T = np.asarray(token_ids, dtype=np.int64)
    trained_T = np.ones(len(token_ids), np.bool_)
    return _demonstrated(prompt, prompt.token_ids, response_ids_T, trained_T, prompt.answer)


def demonstrated_conversation(
    prompt: Prompt, token_ids: Sequence[int], is_trained: Sequence[bool], text: str = ""
) -> SampleGroup:
    """A whole conversation as a group of one sample, for supervised steps.

    token_ids: from the first token of the system's or user's message on. is_trained: of each of them, whether it is the
    model's to write. What comes before the first such token is the prompt, and what comes after the last is left out.
    text: the model's words. Raises ValueError where no token is trained on, or the first one.
    """
    ids_T = np.asarray(token_ids, dtype=np.int64)
    trained_T = np.asarray(is_trained, dtype=np.bool_)
    places = np.flatnonzero(trained_T)
    if len(ids_T) != len(trained_T) or not len(places) or not places[0]:
        problem = f"{len(ids_T)} tokens with {len(trained_T)} marks, of which {len(places)} are of tokens to train on"
        raise ValueError(
            f"a conversation begins with a prompt and has tokens to train on; this has {problem}"
        )
    response = slice(places[0], places[-1] + 1)
    prompt_ids = ids_T[: places[0]].tolist()
    if prompt_ids == list(prompt.token_ids):
        prompt_ids = prompt.token_ids
    return _demonstrated(prompt, prompt_ids, ids_T[response], trained_T[response], text)


def _demonstrated(
    prompt: Prompt,
    prompt_ids: Sequence[int],
    response_ids_T: IntArray,
    trained_T: BoolArray,
    text: str,
) -> SampleGroup:
    """The group of one sample, whose reward is 1 and whose logprobs are 0."""
    num_tokens = len(response_ids_T)
    row = Row(
        prompt_ids,
        response_ids_T,
        engine_logp_T=np.zeros(num_tokens, np.float32),
        trained_T=trained_T,
        parts=(SamplePart(0, num_tokens),),
    )
    sample = Sample((row,), text, finished=True)
    return SampleGroup(prompt, (sample,), np.ones(1, dtype=np.float32), np.ones(1, dtype=np.bool_))
