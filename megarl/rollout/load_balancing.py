"""Load balancing of requests over engines, and over an engine's attention groups: the fewest expected tokens. Pure.

Lengths are unknown when a request is sent. What a receiver cannot run yet therefore waits in one queue in front of all
of them, and goes to the receiver that has the least left when there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Overcommitment of the KV cache: expected final tokens over its size. Sequences of log-normal lengths (sigma 0.8) that
# start together never hold more than 0.4 of the tokens that they end with, because the short ones leave while the long
# ones grow. Later, at all ages, they hold 0.9 of them in the mean.
# The values are the best of those tried in scripts/bench/balancing.py.
_OVERCOMMIT_TOGETHER = 2.0
_OVERCOMMIT_MIXED = 1.25
_FIRST_GUESS = 0.25  # of the longest response
# responses that the mean of the round before counts as: that round may have been an evaluation
_MOST_BEFORE = 1024


@dataclass(frozen=True)
class Capacity:
    """What a receiver can run at once: sequences, and tokens in its KV cache."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class CompletedSample:
    """A sample that an engine has finished; group: of the engine's attention groups."""

    group: int
    prompt_tokens: int
    response_tokens: int


@dataclass
class _Outstanding:
    """What a receiver was dealt and has not finished."""

    sequences: int = 0
    prompt_tokens: int = 0
    started_together: bool = True  # none of them has finished since the receiver had nothing


@dataclass
class _Responses:
    """How many responses have finished, and their tokens."""

    count: int = 0
    tokens: float = 0.0


class RequestBalancer:
    """Books what each receiver was dealt, and what of it has finished.

    A sequence counts with its prompt and the mean response until it has finished: of the responses that have finished
    since nothing was outstanding, with the mean of the round before as that of 1,024 more at most: without it the first
    to finish, which are the short ones, would be the mean. A sequence that is longer than the mean goes on counting as
    much, because of log-normal lengths those that are long already have the most left.
    """

    def __init__(self, capacities: Sequence[Capacity | None], longest_response: int) -> None:
        """capacities: of the receivers; None for one that is to `join`."""
        self._capacities = [*capacities]
        self._loads = [_Outstanding() for _ in capacities]
        self._last = len(capacities) - 1
        self._before = _Responses(1, _FIRST_GUESS * longest_response)  # of the round before
        self._now = _Responses()

    @property
    def mean_response(self) -> float:
        return (self._before.tokens + self._now.tokens) / (self._before.count + self._now.count)

    def expected_tokens(self, receiver: int) -> float:
        """Of all that the receiver was dealt and has not finished."""
        load = self._loads[receiver]
        return load.prompt_tokens + load.sequences * self.mean_response

    def assign(self, prompt_tokens: int, samples: int = 1) -> int | None:
        """The receiver of a prompt's samples, which is booked; None while no receiver has room.

        A receiver has room while it has less than it can run: of a prompt's samples the last ones may have to wait
        there. Receivers with equally many expected tokens take turns.
        """
        if self._now.count and not any(load.sequences for load in self._loads):
            weight = min(self._now.count, _MOST_BEFORE)
            self._before = _Responses(weight, weight * self._now.tokens / self._now.count)
            self._now = _Responses()
        receiver = self._least_loaded()
        if receiver is not None:
            self._last = receiver
            self._book(receiver, samples, samples * prompt_tokens)
        return receiver

    def finish(self, receiver: int, prompt_tokens: int, response_tokens: int) -> None:
        """A sample has finished."""
        self.withdraw(receiver, prompt_tokens)
        self._now.count += 1
        self._now.tokens += response_tokens

    def leave(self, receiver: int) -> None:
        """The receiver is lost, with all that it was dealt."""
        self._capacities[receiver] = None
        self._loads[receiver] = _Outstanding()

    def join(self, receiver: int, capacity: Capacity) -> None:
        """A receiver is there, or back, with nothing to do."""
        self._capacities[receiver] = capacity

    def withdraw(self, receiver: int, prompt_tokens: int) -> None:
        """A sample was not sent, or was aborted: its length says nothing about others."""
        self._book(receiver, -1, -prompt_tokens)

    def _least_loaded(self) -> int | None:
        """The receiver with the fewest expected tokens that has room; of equal ones the next in turn."""
        # Written out, for it runs for each of thousands of requests over hundreds of receivers.
        least_loaded = None
        least = math.inf
        mean = self.mean_response
        for turn in range(self._last + 1, self._last + 1 + len(self._loads)):
            receiver = turn % len(self._loads)
            capacity = self._capacities[receiver]
            if capacity is None:
                continue
            load = self._loads[receiver]
            expected = load.prompt_tokens + load.sequences * mean
            if expected < least and _has_room(capacity, load, expected):
                least_loaded = receiver
                least = expected
        return least_loaded

    def _book(self, receiver: int, samples: int, prompt_tokens: int) -> None:
        load = self._loads[receiver]
        load.sequences += samples
        load.prompt_tokens += prompt_tokens
        load.started_together = load.started_together and samples > 0 or not load.sequences


def _has_room(capacity: Capacity, load: _Outstanding, expected_tokens: float) -> bool:
    share = _OVERCOMMIT_TOGETHER if load.started_together else _OVERCOMMIT_MIXED
    return load.sequences < capacity.sequences and expected_tokens < share * capacity.tokens
