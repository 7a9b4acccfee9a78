"""The tokens of a conversation as they come: a prompt, then what the model samples and what is said to it in between.

Nothing is ever changed or removed: a row of training data is what the engine read and wrote, token for token. `row`
proves it, by a hash of all tokens that the engine was given at each turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.types import EpisodeRow, Sample, SamplePart, with_part

Hash = Any  # of hashlib


class Conversation:
    """prompt_ids: of the conversation, up to and with the generation prompt."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_length = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logp: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._rewards: dict[int, float] = {}  # by the place of the token
        self._parts: tuple[SamplePart, ...] = ()
        self._experts: list[np.ndarray] = []
        self._hash = hashlib.blake2b(_bytes(self._ids))
        self._asked: list[tuple[int, bytes]] = []  # of each turn: its first token's place, the hash of all before

    @property
    def ids(self) -> Sequence[int]:
        """All tokens so far, which the next turn is sampled after."""
        return self._ids

    def begins_with(self, prompt_ids: Sequence[int]) -> bool:
        """Whether this is the conversation's prompt."""
        return self._ids[: self._prompt_length] == list(prompt_ids)

    @property
    def response_length(self) -> int:
        """The tokens after the prompt."""
        return len(self._ids) - self._prompt_length

    @property
    def known_rows(self) -> int:
        """The tokens whose routed experts are known: all that the engine has computed, but the last one."""
        return len(self._ids) - 1 - self._said if self._parts else 0

    @property
    def _said(self) -> int:
        """Tokens at the end that the engine has not read yet."""
        return len(self._trained[-1]) if self._trained and not self._trained[-1].any() else 0

    def add_turn(self, turn: Sample) -> None:
        """What the engine sampled after `ids`, as a sample whose prompt they were."""
        self._asked.append((len(self._ids), self._hash.digest()))
        self._append(turn.response_ids_T.tolist(), turn.engine_logp_T, is_trained=True)
        for part in turn.parts:
            self._parts = with_part(self._parts, part)
        if turn.routed_experts is not None:
            self._experts.append(turn.routed_experts)

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

    def row(self) -> EpisodeRow:
        """The conversation as a row, which ends with the last turn.

        Raises RuntimeError unless each turn was sampled after exactly the tokens that the row has before it.
        """
        response_ids_T = np.asarray(self._ids[self._prompt_length :], np.int64)
        self._check_turns()
        trained_T = np.concatenate([np.zeros(0, np.bool_), *self._trained])
        rewards_T = np.zeros(len(response_ids_T), np.float32)
        for place, reward in self._rewards.items():
            rewards_T[place - self._prompt_length] = reward
        return EpisodeRow(
            response_ids_T,
            np.concatenate([np.zeros(0, np.float32), *self._logp]),
            self._parts,
            np.asarray(self._ids[: self._prompt_length], np.int64),
            None if trained_T.all() else trained_T,
            rewards_T if self._rewards else None,
            np.concatenate(self._experts) if self._experts else None,
        )

    def _append(self, ids: Sequence[int], logp_T: np.ndarray, *, is_trained: bool) -> None:
        self._ids += ids
        self._hash.update(_bytes(ids))
        self._logp.append(logp_T)
        self._trained.append(np.full(len(ids), is_trained))

    def _check_turns(self) -> None:
        found, start = hashlib.blake2b(), 0
        for place, asked in self._asked:
            found.update(_bytes(self._ids[start:place]))
            start = place
            if found.digest() != asked:
                raise RuntimeError(f"token {place} of a conversation was sampled after other tokens than are before it")
        if self._experts and sum(map(len, self._experts)) != len(self._ids) - 1:
            have = sum(map(len, self._experts))
            raise RuntimeError(f"a conversation of {len(self._ids)} tokens has the routed experts of {have}")


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
