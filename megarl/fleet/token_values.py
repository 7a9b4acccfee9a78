"""What the controller holds of the tokens of a step: references to what each rank computed, never the arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from megarl.cluster.actor import Ref


@dataclass(frozen=True)
class PerToken:
    """What all ranks of a group computed of the samples of a step, once for the ranks that hold the same.

    shares: of each data-parallel rank its updates and their samples. states: of each rank, for its own next call.
    token_values: of each rank that reports, the part of each data-parallel rank of the readers.
    """

    shares: list[tuple[Ref, Ref]]
    states: list[Ref]
    token_values: list[list[Ref]]

    def of(self, dp: int) -> list[Ref]:
        """The token values of the readers' data-parallel rank `dp`."""
        return [parts[dp] for parts in self.token_values]


    def for_readers(self) -> Self:
        """Without the samples and states of the ranks' own next call, once it is done: the object store frees them."""
        return replace(self, shares=[], states=[])


class Observation(PerToken):
    """KL penalties for the critic, and what the policy's ranks need not compute again when they train."""


class TokenValues(PerToken):
    """An auxiliary model's values or process rewards for the policy, and what its own updates read of them."""
