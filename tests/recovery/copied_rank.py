"""A process with a state as a training rank has one, for tests of its copies."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from megarl.types import ByteArray


class CopiedRank:
    """Its state is so many random bytes, which the seed decides."""

    def __init__(self, seed: int, num_bytes: int) -> None:
        self.small = b"small parts of %d" % seed
        self.content: ByteArray = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        self._pretended_bytes = num_bytes
        self._waits_for: Path | None = None

    def pretend(self, num_bytes: int) -> None:
        """Say that the state has so many bytes."""
        self._pretended_bytes = num_bytes

    def wait_for(self, file: Path) -> None:
        """Hand nothing out until there is a file."""
        self._waits_for = file

    def digest(self) -> tuple[str, bytes]:
        return hashlib.sha256(self.content.tobytes()).hexdigest(), self.small

    def begin_copy(self) -> tuple[int, bytes]:
        return self._pretended_bytes, self.small

    def copied_bytes(self, start: int, end: int) -> ByteArray:
        while self._waits_for and not self._waits_for.exists():
            time.sleep(0.01)
        return self.content[start:end]

    def end_copy(self) -> None:
        pass

    def begin_restore(self, num_bytes: int) -> None:
        self.content = np.zeros(num_bytes, np.uint8)

    def restore_bytes(self, start: int, content: ByteArray) -> None:
        self.content[start : start + len(content)] = content

    def finish_restore(self, small: bytes) -> None:
        self.small = small
