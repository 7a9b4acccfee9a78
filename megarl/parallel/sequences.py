"""Variable-length sequences <-> one packed row of T tokens (Megatron's THD layout). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.types import FloatArray, TrainSequence


@dataclass(frozen=True)
class PackedTargets:
    """What a loss reads, every tensor [T]: entry t is about the token that position t predicts.

    The last position of every sequence predicts nothing: it is masked, as is the padding.
    """

    loss_mask_T: torch.Tensor
    loss_weight_T: torch.Tensor
    advantage_T: torch.Tensor
    engine_logp_T: torch.Tensor


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch. token_ids_T, labels_T: int64 [T]; bounds: int32 [segments + 1], where each segment starts.

    `lengths` are the sequences' own; when padding was needed one more segment, the last, holds it.
    """

    token_ids_T: torch.Tensor
    labels_T: torch.Tensor
    bounds: torch.Tensor
    max_length: int
    lengths: tuple[int, ...]
    targets: PackedTargets
    old_logp_T: torch.Tensor | None


def pack(
    sequences: Sequence[TrainSequence],
    *,
    multiple: int,
    device: str,
    old_logp: Sequence[FloatArray] | None = None,
) -> PackedRow:
    """Lay sequences end to end and pad the row to a multiple (sequence parallelism splits it tp ways).

    old_logp holds one array per sequence, aligned like the sequence's own arrays.
    """
    lengths = tuple(len(one.token_ids_T) for one in sequences)
    total = sum(lengths)
    padding = -total % multiple
    segments = [*lengths, padding] if padding else [*lengths]

    def row(arrays: Sequence[np.ndarray], dtype: type, *, shifted: bool) -> torch.Tensor:
        values_T = np.zeros(total + padding, dtype=dtype)
        start = 0
        for values in arrays:
            own = values[1:] if shifted else values
            values_T[start : start + len(own)] = own
            start += len(values)
        return torch.from_numpy(values_T).to(device)

    def about_next(name: str, dtype: type) -> torch.Tensor:
        return row([getattr(one, name) for one in sequences], dtype, shifted=True)

    return PackedRow(
        token_ids_T=row([one.token_ids_T for one in sequences], np.int64, shifted=False),
        labels_T=about_next("token_ids_T", np.int64),
        bounds=torch.tensor([0, *np.cumsum(segments)], dtype=torch.int32, device=device),
        max_length=max(segments),
        lengths=lengths,
        targets=PackedTargets(
            loss_mask_T=about_next("loss_mask_T", np.bool_),
            loss_weight_T=about_next("loss_weight_T", np.float32),
            advantage_T=about_next("advantage_T", np.float32),
            engine_logp_T=about_next("engine_logp_T", np.float32),
        ),
        old_logp_T=None if old_logp is None else row(old_logp, np.float32, shifted=True),
    )


def unpack(row: PackedRow, values_T: torch.Tensor) -> list[FloatArray]:
    """Per-position values -> one float32 array per sequence, aligned to the token each is about; the first is 0."""
    flat_T = values_T.detach().float().cpu().numpy()
    arrays, start = [], 0
    for length in row.lengths:
        own_T = np.zeros(length, dtype=np.float32)
        own_T[1:] = flat_T[start : start + length - 1]
        arrays.append(own_T)
        start += length
    return arrays
