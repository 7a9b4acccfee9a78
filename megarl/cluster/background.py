"""What goes on while the controller waits for something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megarl.cluster.actor import Ref


class Background(Protocol):
    """Work that goes on while the controller waits for other calls, by calls of its own."""

    def labels(self) -> Mapping[Ref, str]:
        """The calls that are open."""
        ...

    def take(self, ended: Sequence[Ref]) -> None:
        """Go on after some of these calls have returned."""
        ...
