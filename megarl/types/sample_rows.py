"""The rows of a sample: conversations, each of which is one sequence to train on.

A row is a prompt and the tokens that were appended to it. A response of the engine is one row. Nearly always an episode
has one row, too; only an agent that rewrites its history, or has several conversations, makes more. All rows of a
sample together have one reward, one advantage, and the loss weight of one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.types.arrays import BoolArray, FloatArray, IntArray

UNKNOWN_ENGINE = -1


@dataclass(frozen=True)
class SamplePart:
    """Tokens of a response, one after another, that one version of the weights sampled.

    Tokens that the model did not sample belong to the part of the turn before them. engine: the number of the engine
    that sampled them, UNKNOWN_ENGINE where several did or no engine is known, as after a checkpoint. Equal tokens of
    other engines are an equal part.
    """

    version: int
    num_tokens: int
    engine: int = field(default=UNKNOWN_ENGINE, compare=False)


@dataclass(frozen=True)
class Row:
    """A conversation. All arrays have the length of the response, which is all that follows the prompt.

    prompt_ids: where they are those of the group's prompt, they are that object itself, which takes no memory. The
    response ends with the last token that the model sampled, the end-of-sequence token included when it was sampled.
    trained_T: whether the model sampled the token; engine_logp_T is 0 on the others. The parts, whose versions ascend,
    have all tokens of the response. token_rewards_T: the reward of each turn at its last sampled token, beside that of
    the whole sample; None: no turn has any.

    routed_experts [T - 1, M, K], where they were asked for, are the experts of prompt and response together but for the
    last token, which the engine did not compute, in each of the M layers that have experts, from the model's first on:
    uint8, or int16 if there are more than 256; those of a part's tokens are from when they were sampled.
    """

    prompt_ids: Sequence[int]
    response_ids_T: IntArray
    engine_logp_T: FloatArray
    trained_T: BoolArray
    parts: tuple[SamplePart, ...]
    token_rewards_T: FloatArray | None = None
    routed_experts: npt.NDArray[Any] | None = None

    @classmethod
    def response(
        cls,
        prompt_ids: Sequence[int],
        response_ids_T: IntArray,
        engine_logp_T: FloatArray,
        parts: tuple[SamplePart, ...],
        routed_experts: npt.NDArray[Any] | None = None,
    ) -> Row:
        """A prompt and one response, of which the model sampled every token."""
        trained_T = np.ones(len(response_ids_T), np.bool_)
        return cls(
            prompt_ids,
            response_ids_T,
            engine_logp_T,
            trained_T,
            parts,
            routed_experts=routed_experts,
        )

    @property
    def num_tokens(self) -> int:
        """The tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids_T)

    @property
    def num_trained(self) -> int:
        """The tokens of the response that the model sampled."""
        return int(self.trained_T.sum())


@dataclass(frozen=True)
class RowSummary:
    """What the controller keeps of a row: lengths in tokens. parts: of the trained tokens alone.

    has_group_prompt: whether its prompt is its group's, token by token.
    """

    length: int  # of prompt and response
    response_length: int
    num_trained: int
    parts: tuple[SamplePart, ...]
    has_group_prompt: bool = False


def with_part(parts: tuple[SamplePart, ...], new: SamplePart) -> tuple[SamplePart, ...]:
    """Parts with a new one after them, which lengthens the last where both are of one version."""
    if parts and parts[-1].version == new.version:
        last = parts[-1]
        engine = last.engine if last.engine == new.engine else UNKNOWN_ENGINE
        return *parts[:-1], SamplePart(new.version, last.num_tokens + new.num_tokens, engine)
    return *parts, new


def merged_parts(parts_of_rows: Sequence[tuple[SamplePart, ...]]) -> tuple[SamplePart, ...]:
    """The parts of several rows together, one for each version, by ascending versions."""
    if len(parts_of_rows) == 1:
        return parts_of_rows[0]
    counts: Counter[int] = Counter()
    for parts in parts_of_rows:
        for part in parts:
            counts[part.version] += part.num_tokens
    return tuple(SamplePart(version, num_tokens) for version, num_tokens in sorted(counts.items()))


def num_stale(parts: Sequence[SamplePart], version: int) -> int:
    """How many of a response's tokens earlier weights than those of `version` sampled: its first ones."""
    return sum(part.num_tokens for part in parts if part.version < version)
