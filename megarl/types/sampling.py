"""How a prompt is sampled, and the seeds that make it repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """num_samples responses to each prompt of at most max_tokens, end of sequence included; temperature 0: greedy.

    phase_tokens: the most new tokens of a response in one call, after which it is open; None: all. stream: the key of
    a prompt's random numbers (run seed, step, number of the prompt) where samples are seeded. recorded_seed: the
    `group_seed` that a file has; None: made of the stream. with_baseline: also sample a greedy response, the baseline.
    may_lose_all: a group may end up empty because all of its verdicts have failed. stop: texts, each of which ends a
    response with the token that completes it.
    """

    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    phase_tokens: int | None = None
    stream: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    recorded_seed: int | None = None
    with_baseline: bool = False
    may_lose_all: bool = False

    @property
    def group_size(self) -> int:
        """The responses to each prompt, with the baseline."""
        return self.num_samples + self.with_baseline

    @property
    def group_seed(self) -> int:
        """The seed of the environments or agents of a prompt's episodes: the same, because they are compared."""
        if self.recorded_seed is None:
            return sample_seed(self.stream, -1)
        return self.recorded_seed

    def new_tokens(self, response_tokens: int) -> int:
        """The most new tokens of a response that has so many already."""
        left = self.max_tokens - response_tokens
        return left if self.phase_tokens is None else min(self.phase_tokens, left)


def sample_seed(stream: Sequence[int], index: int) -> int:
    """The 63-bit seed of sample `index` of a prompt. stream: identifies the prompt (run seed, step, prompt...)."""
    name = ",".join(map(str, (*stream, index)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
