"""Statistics of optimizer updates: each declares, where it is computed, its published name and how it is reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """How a statistic's values of micro-batches, data-parallel ranks and updates become one number.

    A value has one or more parts, each of which is reduced by itself: added up, or is_max: the largest. is_update_mean:
    the sums of a step's updates are averaged over the updates that have one. result: from the reduced parts to the
    number; None: there is no number to publish.
    """

    result: Callable[..., float | None] = float
    is_max: bool = False
    is_update_mean: bool = False


def ratio(total: float, count: float) -> float | None:
    """total / count, the number of a mean."""
    return total / count if count else None


def largest(greatest: float, count: float) -> float | None:
    """The largest of a number of values; None where there was none."""
    return greatest if count else None


SUM = Reduction()
MAX = Reduction(largest, is_max=True)  # parts: the largest, and how many there were
MEAN = Reduction(ratio)  # parts: a sum, and the number of what was added up
UPDATE_MEAN = Reduction(is_update_mean=True)


@dataclass(frozen=True)
class Statistic:
    """A number of an update.

    name: as it is published, `room/name`; without a room, in that of the model that is updated (`train`, `warm_start`
    or `critic`). each_update: with several updates in a step, the policy's are also published one by one.
    """

    name: str
    reduction: Reduction = MEAN
    each_update: bool = False

    def published_in(self, room: str) -> str:
        """The published name, where the updated model's room is `room`."""
        if "/" in self.name:
            return self.name
        return f"{room}/{self.name}"


# the parts of each, reduced over micro-batches and ranks
Statistics = dict[Statistic, tuple[float, ...]]

LOSS = Statistic("loss", UPDATE_MEAN, each_update=True)
GRAD_NORM = Statistic("grad_norm", UPDATE_MEAN, each_update=True)
TOKENS = Statistic("tokens", SUM, each_update=True)
CLIPPED = Statistic("clipped")  # share of tokens whose objective is clipped


def over_tokens(mask_T: Tensor, values: Mapping[Statistic, Tensor]) -> dict[Statistic, Tensor]:
    """Each statistic's values [T] over the masked tokens as parts: sum and count, the sum, or the largest and count."""
    parts_by_statistic = {}
    with torch.no_grad():
        for statistic, value_T in values.items():
            kept_T = torch.where(mask_T, value_T, 0)  # a maximum is of values that are not negative
            if statistic.reduction.is_max:
                total = kept_T.max()
            else:
                total = kept_T.sum()
            parts_by_statistic[statistic] = (
                total if statistic.reduction == SUM else parts(total, mask_T.sum())
            )
    return parts_by_statistic


def parts(*values: Tensor) -> Tensor:
    """The parts of a statistic, float64 [parts], from tensors of one number each."""
    return torch.stack([value.detach().double() for value in values])
