"""The tokens of a conversation as they come: a prompt, then what the model samples and what is said to it in between.

Nothing is ever changed or removed: a row of training data is what the engine read and wrote, token for token. `row`
proves it, by a hash of all tokens that the engine was given at each turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from megarl.types import Row, Sample, SamplePart, with_part

Hash = Any  # of hashlib
Asked = tuple[int, bytes]  # of a turn: its first token's place, and the hash of all tokens before


class Conversation:
    """prompt_ids: of the conversation, up to and with the generation prompt; its row gets this very object."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.prompt_length = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logp: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._rewards: dict[int, float] = {}  # by the place of the token
        self._parts: tuple[SamplePart, ...] = ()
        self._experts: list[np.ndarray] = []
        self._hash = hashlib.blake2b(_bytes(self._ids))
        self._asked: list[Asked] = []

    @classmethod
    def restored(cls, row: Row, prompt_ids: Sequence[int], digest: bytes) -> Self:
        """The conversation of a row, which an earlier phase has left open.

        prompt_ids: the row's. digest: what the conversation's `digest` was, by which the row is proven as by the hash
        of a turn.
        """
        conversation = cls(prompt_ids)
        response_ids = row.response_ids_T.tolist()
        conversation._ids += response_ids
        conversation._hash.update(_bytes(response_ids))
        conversation._logp = [row.engine_logp_T]
        conversation._trained = [row.trained_T]
        conversation._parts = row.parts
        if row.token_rewards_T is not None:
            for place in np.flatnonzero(row.token_rewards_T).tolist():
                reward = float(row.token_rewards_T[place])
                conversation._rewards[conversation.prompt_length + place] = reward
        if row.routed_experts is not None:
            conversation._experts = [row.routed_experts]
        conversation._asked = [(len(conversation._ids), digest)]
        return conversation

    @property
    def digest(self) -> bytes:
        """The hash of all tokens that the row has."""
        return hashlib.blake2b(_bytes(self._ids[: len(self._ids) - self._said])).digest()

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
        return bool(self._asked)

    def asked(self) -> Asked:
        """What `add_turn` takes, at the moment when the engine is given `ids`."""
        return len(self._ids), self._hash.digest()

    @property
    def response_length(self) -> int:
        """The tokens after the prompt."""
        return len(self._ids) - self.prompt_length

    @property
    def known_rows(self) -> int:
        """The tokens whose routed experts are known: all that the engine has computed, but the last one."""
        if self._parts:
            return len(self._ids) - 1 - self._said
        return 0

    @property
    def _said(self) -> int:
        """Tokens at the end that the engine has not read yet."""
        if self._trained and not self._trained[-1].any():
            return len(self._trained[-1])
        return 0

    def add_turn(self, turn: Sample, asked: Asked) -> None:
        """What the engine sampled after `ids`, as a sample whose prompt they were; asked: from before the sampling."""
        row = turn.only_row
        self._asked.append(asked)
        self._append(row.response_ids_T.tolist(), row.engine_logp_T, is_trained=True)
        for part in row.parts:
            self._parts = with_part(self._parts, part)
        if row.routed_experts is not None:
            self._experts.append(row.routed_experts)

    def add_message(self, ids: Sequence[int]) -> None:
        """What is said to the model before its next turn, up to and with the generation prompt."""
        assert self._parts, "the first message is the prompt"
        self._append(ids, np.zeros(len(ids), np.float32), is_trained=False)
        self._parts = with_part(self._parts, SamplePart(self._parts[-1].version, len(ids)))

    def add_reward(self, reward: float) -> None:
        """The reward of the last turn, at its last token."""
        if reward:
            place = len(self._ids) - 1
            self._rewards[place] = self._rewards.get(place, 0.0) + reward

    def row(self) -> Row:
        """The conversation as a row, which ends with the last turn: a message that no turn followed is left out.

        Raises RuntimeError unless each turn was sampled after exactly the tokens that the row has before it.
        """
        end = len(self._ids) - self._said
        self._check_turns(end)
        parts = self._parts
        if self._said:
            parts = *parts[:-1], SamplePart(parts[-1].version, parts[-1].num_tokens - self._said)
        response_ids_T = np.asarray(self._ids[self.prompt_length : end], np.int64)
        num_tokens = len(response_ids_T)
        rewards_T = np.zeros(num_tokens, np.float32)
        for place, reward in self._rewards.items():
            rewards_T[place - self.prompt_length] = reward
        return Row(
            prompt_ids=self.prompt_ids,
            response_ids_T=response_ids_T,
            engine_logp_T=np.concatenate([np.zeros(0, np.float32), *self._logp])[:num_tokens],
            trained_T=np.concatenate([np.zeros(0, np.bool_), *self._trained])[:num_tokens],
            parts=parts,
            token_rewards_T=rewards_T if self._rewards else None,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

    def _append(self, ids: Sequence[int], logp_T: np.ndarray, *, is_trained: bool) -> None:
        self._ids += ids
        self._hash.update(_bytes(ids))
        self._logp.append(logp_T)
        self._trained.append(np.full(len(ids), is_trained))

    def _check_turns(self, length: int) -> None:
        """length: of the row."""
        hash_so_far = hashlib.blake2b()
        start = 0
        for place, asked in self._asked:
            hash_so_far.update(_bytes(self._ids[start:place]))
            start = place
            if hash_so_far.digest() != asked:
                raise RuntimeError(
                    f"token {place} of a conversation was sampled after other tokens than are before it"
                )
        if self._experts and (have := sum(map(len, self._experts))) != length - 1:
            raise RuntimeError(
                f"a conversation of {length} tokens has the routed experts of {have}"
            )


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
