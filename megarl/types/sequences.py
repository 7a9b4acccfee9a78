"""What a rank trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megarl.types.arrays import BoolArray, FloatArray, IntArray

Value = TypeVar("Value")


@dataclass(frozen=True)
class TrainSequence:
    """One sequence to train on, prompt and response together; every array is [T], aligned to the token it is about.

    The sequences of an episode's rows have one sample's reward and outcome together.
    """

    token_ids_T: IntArray
    # True on the tokens that are trained on; the arrays below are 0 where no token was sampled
    loss_mask_T: BoolArray
    # in the loss sum: 1 for a mean over tokens, 1 / (tokens of the sample) for samples
    loss_weight_T: FloatArray
    engine_logp_T: FloatArray
    _: KW_ONLY
    reward: float = 0.0  # of the whole response
    outcome: float = 0.0  # 1 where the response is correct, else 0
    # data-parallel ranks that have this sequence and split its row among them
    cp: int = 1
    # None until megarl.training.credit has computed it; demonstrations have none
    advantage_T: FloatArray | None = None
    # weight of -log p in the loss sum, added to the policy loss; None: 0
    nll_weight_T: FloatArray | None = None
    # whether an earlier policy than the step's sampled the token; None: no token
    is_stale_T: BoolArray | None = None
    # sampled tokens that a mismatch correction took out of the mask; None: none
    dropped_T: BoolArray | None = None
    # Sample.routed_experts, of the T - 1 tokens that the engine computed
    experts_TMK: npt.NDArray[Any] | None = None
    # numbers of group, sample and row; None: a sample of one row
    key: tuple[int, int, int] | None = None
    # rewards of an episode's turns, each at the turn's last token; None: 0
    token_rewards_T: FloatArray | None = None
    # of an episode, the turn of each trained token, from 1; None: the first
    turn_T: IntArray | None = None

    @property
    def sampled_T(self) -> BoolArray:
        """The tokens that the model sampled, whether the loss keeps them or not."""
        if self.dropped_T is None:
            return self.loss_mask_T
        return self.loss_mask_T | self.dropped_T


def sample_numbers(sequences: Sequence[TrainSequence]) -> IntArray:
    """The number of each sequence's sample, from 0: the rows of an episode are one sample."""
    numbers: dict[object, int] = {}
    keys = [
        place if sequence.key is None else sequence.key[:2]
        for place, sequence in enumerate(sequences)
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def regrouped(
    values: Iterable[Value], micro_batches: Sequence[Sequence[object]]
) -> list[list[Value]]:
    """A value for each sequence, in order -> those of each micro-batch."""
    remaining = iter(values)
    return [[next(remaining) for _ in batch] for batch in micro_batches]
