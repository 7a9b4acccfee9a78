"""A process that has run out of memory, and what memory it had then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.types.errors import ProcessLost

_GB = 1e9


@dataclass(frozen=True)
class MemoryUse:
    """What a process has measured when an allocation failed. words: the allocator's. bytes_by_name: what it held."""

    words: str
    bytes_by_name: Mapping[str, int]

    def __str__(self) -> str:
        held = ", ".join(
            f"{name} {count / _GB:.2f} GB" for name, count in self.bytes_by_name.items()
        )
        return f"{self.words}; measured: {held}" if held else self.words


class OutOfMemory(ProcessLost):
    """A call has failed for want of memory; its process is of no more use. The text is the same each time.

    So a training that runs out of memory twice is recognised as the same error.
    """

    def __init__(self, kind: str, use: MemoryUse) -> None:
        """kind: the name of the exception that was raised."""
        super().__init__(kind, use)
        self.kind = kind
        self.use = use

    def __str__(self) -> str:
        return f"out of memory ({self.kind})"
