"""Endless streams of prompts: of one file, and of several files by their weights."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import islice

import numpy as np

from megarl.types import IntArray, Prompt

# The fractional parts of the golden ratio's multiples are spread as evenly as any number's (Knuth, TAOCP 3, 6.4): any n
# consecutive prompts deviate from the weights by about log(n) prompts, and no period coincides with the engines' turns.
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_SKIPPED_AT_ONCE = 1 << 20


class PromptStream:
    """An endless stream of prompts: each epoch has every prompt once, in a new order that depends only on the seed."""

    def __init__(self, prompts: Sequence[Prompt], seed: int | str) -> None:
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = list(prompts)
        self._seed = seed
        self._random = random.Random(seed)
        self._epoch: Iterator[Prompt] = iter(())  # what is left of it
        self.taken = 0  # prompts since the stream began; the whole state of the stream

    def rewind(self) -> None:
        """Begin again, with the same prompts in the same order."""
        self._random = random.Random(self._seed)
        self._epoch = iter(())
        self.taken = 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the prompts and their order."""
        sha = hashlib.sha256()
        for prompt in self._prompts:
            sha.update(f"{prompt.id}\0{prompt.text}\0{prompt.answer}\0".encode())
        return sha.hexdigest()

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, across the end of an epoch where necessary."""
        taken = list(islice(self._epoch, n))
        while len(taken) < n:
            self._epoch = iter(self._random.sample(self._prompts, len(self._prompts)))
            taken += islice(self._epoch, n - len(taken))
        self.taken += n
        return taken

    def skip_to(self, taken: int) -> None:
        """Resume as if this many prompts had been taken from a new stream."""
        while self.taken < taken:
            self.take(min(len(self._prompts), taken - self.taken))


class MixedStream(PromptStream):
    """An endless stream of prompts of several files, in proportion to their weights; each file has its own epochs.

    The file of the n-th prompt depends only on n, the seed and the weights, so that `taken` is the whole state.
    """

    def __init__(
        self, files: Sequence[Sequence[Prompt]], weights: Sequence[float], seed: int
    ) -> None:
        """files: at least one prompt each; weights: above 0."""
        super().__init__([prompt for file in files for prompt in file], seed)
        self._streams = [
            PromptStream(file, f"{seed} {number}") for number, file in enumerate(files)
        ]
        self._offset = random.Random(f"{seed} mix").getrandbits(64)
        self._bounds = _bounds(weights)

    def rewind(self) -> None:
        super().rewind()
        for stream in self._streams:
            stream.rewind()

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the prompts, their order and the weights."""
        parts = [
            *(stream.fingerprint for stream in self._streams),
            *map(str, self._bounds.tolist()),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def take(self, n: int) -> list[Prompt]:
        files = self._files(self.taken, n)
        counts = np.bincount(files, minlength=len(self._streams)).tolist()
        drawn = [
            iter(stream.take(count)) for stream, count in zip(self._streams, counts, strict=True)
        ]
        self.taken += n
        return [next(drawn[file]) for file in files.tolist()]

    def skip_to(self, taken: int) -> None:
        counts = np.zeros(len(self._streams), dtype=np.int64)
        for first in range(self.taken, taken, _SKIPPED_AT_ONCE):
            files = self._files(first, min(_SKIPPED_AT_ONCE, taken - first))
            counts += np.bincount(files, minlength=len(self._streams))
        for stream, count in zip(self._streams, counts.tolist(), strict=True):
            stream.skip_to(stream.taken + count)
        self.taken = max(self.taken, taken)

    def _files(self, first: int, n: int) -> IntArray:
        """The file of each of n prompts, from number `first` on; computed in integers, so equal on every machine."""
        places = np.arange(first, first + n, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(
            self._offset
        )
        return np.searchsorted(self._bounds, places, side="right").astype(np.int64)


def _bounds(weights: Sequence[float]) -> np.ndarray:
    """The end of each file's interval but the last one's in [0, 2^64); the intervals' lengths follow the weights."""
    exact = [Fraction(weight) for weight in weights]
    ends = [sum(exact[: number + 1], Fraction()) / sum(exact) for number in range(len(exact) - 1)]
    return np.asarray([min(int(end * 2**64), 2**64 - 1) for end in ends], dtype=np.uint64)
