"""What a training rank of the policy has of a step: its share of each update, and the logprobs computed before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from megarl import device
from megarl.parallel.pipeline import Norms
from megarl.parallel.routing import Choices
from megarl.training.rank import MicroBatches
from megarl.types import FloatArray
from megarl.types.arrays import TokenArrays

# of one micro-batch by layer: [tokens of this rank, experts per token]
HostChoices = dict[int, npt.NDArray[np.int16]]


@dataclass(frozen=True)
class UpdateShare:
    """This rank's share of one update, with what the old policy and the reference computed of it.

    old_logp: of the policy before this step's updates, one array per sequence; None: those of the update's own pass.
    choices: the experts to replay, or where to record them, one for each micro-batch. temperature: of the policy, as in
    `token_outputs`. has_turns: as of the Update, where there are an engine's logprobs.
    """

    micro_batches: MicroBatches
    norms: Norms
    old_logp: TokenArrays | None = None
    choices: Sequence[Choices] | None = None
    reference_logp: TokenArrays | None = None
    temperature: float = 1.0
    has_turns: bool = False


@dataclass(frozen=True)
class Logprobs:
    """What a rank computed of its share of a step with the policy before the updates, and with the reference.

    It goes back to the same rank, by way of the object store of its node, so all of it is in host memory. old_logp,
    reference_logp and choices: by update, as in UpdateShare, but choices (None where the old policy's are not replayed)
    are of each micro-batch by layer, int16 [tokens of this rank, experts per token]. kl_penalties: of each sequence.
    """

    old_logp: list[list[FloatArray] | None]
    reference_logp: list[list[FloatArray] | None]
    choices: list[list[HostChoices] | None]
    kl_penalties: list[FloatArray] | None


def moved_to_host(choices: Choices) -> HostChoices:
    """The choices of experts, which the device holds no more."""
    moved = {
        layer: experts_NK.to("cpu", torch.int16).numpy()
        for layer, experts_NK in choices.experts.items()
    }
    choices.experts.clear()
    return moved


def _on_device(choices: HostChoices) -> Choices:
    return Choices(
        {
            layer: torch.from_numpy(experts_NK).to(device.DEVICE)
            for layer, experts_NK in choices.items()
        }
    )


def with_logprobs(share: UpdateShare, logprobs: Logprobs, index: int) -> UpdateShare:
    """The share, number `index` of the step's updates, with what the old policy and the reference computed of it."""
    choices = share.choices
    noted = logprobs.choices[index]
    if noted is not None:
        choices = [_on_device(of_micro_batch) for of_micro_batch in noted]
    return replace(
        share,
        old_logp=logprobs.old_logp[index],
        choices=choices,
        reference_logp=logprobs.reference_logp[index],
    )
