"""The tokens of a conversation as they come: a prompt, then what the model samples and what is said to it in between.

Nothing is ever changed or removed: a row of training data is what the engine read and wrote, token for token. At each
turn the tokens that the engine was given are compared with the conversation's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from megarl.types import Row, Sample, SamplePart, with_part


class Conversation:
    """prompt_ids: of the conversation, up to and with the generation prompt; its row gets this very object."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.prompt_length = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logp = [np.zeros(0, np.float32)]
        self._trained = [np.zeros(0, np.bool_)]
        self._rewards: dict[int, float] = {}  # by the place of the token in the response
        self._parts: tuple[SamplePart, ...] = ()
        self._experts: list[np.ndarray] = []
        self._said = 0  # tokens at the end that the engine has not read yet

    @classmethod
    def restored(cls, row: Row, prompt_ids: Sequence[int], digest: str) -> Self:
        """The conversation of a row, which an earlier phase has left open.

        prompt_ids: the row's. digest: what the conversation's `digest` was. Raises RuntimeError where the row has other
        tokens.
        """
        conversation = cls(prompt_ids)
        conversation._ids += row.response_ids_T.tolist()
        conversation._logp = [row.engine_logp_T]
        conversation._trained = [row.trained_T]
        conversation._parts = row.parts
        if row.token_rewards_T is not None:
            for place in np.flatnonzero(row.token_rewards_T).tolist():
                conversation._rewards[place] = float(row.token_rewards_T[place])
        if row.routed_experts is not None:
            conversation._experts = [row.routed_experts]
        if conversation.digest != digest:
            raise RuntimeError("a row of an open episode has other tokens than its phase has left")
        return conversation

    @property
    def digest(self) -> str:
        """The hash of all tokens that the row has."""
        return hashlib.blake2b(_bytes(self._ids[: self._end])).hexdigest()

    @property
    def ids(self) -> Sequence[int]:
        """All tokens so far, which the next turn is sampled after."""
        return self._ids

    @property
    def prompt_key(self) -> int:
        """A number of 64 bits that the prompt decides."""
        return int.from_bytes(
            hashlib.blake2b(_bytes(self.prompt_ids), digest_size=8).digest(), "big"
        )

    def is_start_of(self, ids: Sequence[int]) -> bool:
        """Whether these tokens begin with all of the conversation's."""
        return self._ids == list(ids[: len(self._ids)])

    @property
    def has_turns(self) -> bool:
        return bool(self._parts)

    @property
    def response_length(self) -> int:
        """The tokens after the prompt."""
        return len(self._ids) - self.prompt_length

    @property
    def known_rows(self) -> int:
        """The tokens whose routed experts are known: all that the engine has computed, but the last one."""
        if self._parts:
            return self._end - 1
        return 0

    @property
    def _end(self) -> int:
        """The tokens that the row has, with its prompt: all up to the last turn's end."""
        return len(self._ids) - self._said

    def add_turn(self, turn: Sample) -> None:
        """What the engine sampled after `ids`, as a sample whose prompt they were.

        Raises RuntimeError where the engine was given other tokens.
        """
        row = turn.only_row
        if list(row.prompt_ids) != self._ids:
            raise RuntimeError(
                f"a turn was sampled after {len(row.prompt_ids)} tokens that are not the"
                f" {len(self._ids)} of its conversation"
            )
        if self._said:
            self._logp.append(np.zeros(self._said, np.float32))
            self._trained.append(np.zeros(self._said, np.bool_))
            said = replace(self._parts[-1], num_tokens=self._said)
            self._parts = with_part(self._parts, said)
            self._said = 0
        self._ids += row.response_ids_T.tolist()
        self._logp.append(row.engine_logp_T)
        self._trained.append(row.trained_T)
        for part in row.parts:
            self._parts = with_part(self._parts, part)
        if row.routed_experts is not None:
            self._experts.append(row.routed_experts)

    def add_message(self, ids: Sequence[int]) -> None:
        """What is said to the model before its next turn, up to and with the generation prompt."""
        assert self._parts, "the first message is the prompt"
        self._ids += ids
        self._said += len(ids)

    def add_reward(self, reward: float) -> None:
        """The reward of the last turn, at its last token."""
        if reward:
            place = self.response_length - 1
            self._rewards[place] = self._rewards.get(place, 0.0) + reward

    def row(self) -> Row:
        """The conversation as a row, which ends with the last turn: a message that no turn followed is left out."""
        response_ids_T = np.asarray(self._ids[self.prompt_length : self._end], np.int64)
        rewards_T = np.zeros(len(response_ids_T), np.float32)
        for place, reward in self._rewards.items():
            rewards_T[place] = reward
        return Row(
            prompt_ids=self.prompt_ids,
            response_ids_T=response_ids_T,
            engine_logp_T=np.concatenate(self._logp),
            trained_T=np.concatenate(self._trained),
            parts=self._parts,
            token_rewards_T=rewards_T if self._rewards else None,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
