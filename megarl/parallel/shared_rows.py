"""Packed rows in which tokens that several sequences begin with are there once.

The model sees the tokens of a tree (prefixes.py), branch by branch; losses see every sequence whole, as in other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.parallel.packing import PackedRow, SharedPrefixes, Split, pack, rounded_length
from megarl.parallel.prefixes import PrefixTree, prefix_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megarl.types import TrainSequence
    from megarl.types.arrays import TokenArrays


def pack_shared(
    sequences: Sequence[TrainSequence],
    *arrays: TokenArrays | None,
    split: Split,
    device: str,
) -> PackedRow:
    """As `pack`, with prefixes shared where there are any, and then without engines' experts (prefix_checks.py).

    Without context parallelism.
    """
    if not sequences:
        return pack(sequences, *arrays, split=split, device=device)
    tree = prefix_tree([sequence.token_ids_T for sequence in sequences])
    if len(tree.token_ids_U) == len(tree.place_T):
        return pack(sequences, *arrays, split=split, device=device)
    assert split.cp == 1
    whole = pack(sequences, *arrays, split=Split(), device=device)
    return _shared(whole, tree, split, device)


def _shared(whole: PackedRow, tree: PrefixTree, split: Split, device: str) -> PackedRow:
    """The row with the tree's tokens, and padding behind them, in place of its own."""
    size = len(tree.token_ids_U)
    padding = -size % split.multiple
    num_branches = tree.has_branch_SB.shape[1]

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def padded(values_U: np.ndarray, value: int) -> Tensor:
        return on_device(np.pad(values_U, (0, padding), constant_values=value))

    next_T = np.append(tree.place_T[1:], 0)
    ends = np.cumsum(whole.lengths) - 1
    next_T[ends] = tree.place_T[ends]
    shared = SharedPrefixes(
        position_L=padded(tree.depth_U, 0),
        parent_L=padded(tree.parent_U, 0),
        place_T=on_device(tree.place_T),
        next_T=on_device(next_T),
        has_branch_SB=on_device(np.pad(tree.has_branch_SB, (0, 1)).astype(np.float32)),
        branches=tree.branches,
    )
    token_ids_L = padded(tree.token_ids_U, 0)
    length = size + padding
    return replace(
        whole,
        token_ids_L=token_ids_L,
        labels_L=token_ids_L,
        sequence_L=padded(tree.branch_U, num_branches),
        bounds=on_device(np.array([0, length], np.int32)),
        order_T=on_device(np.arange(length)),
        places=np.arange(length),
        max_length=rounded_length(int(tree.depth_U.max()) + 1),
        experts_LMK=None,
        shared=shared,
    )


@dataclass
class RowParams(PackedSeqParams):
    """Megatron's description of a packed row, with the prefixes that its sequences share, if they do."""

    shared: SharedPrefixes | None = None

    @classmethod
    def of(cls, row: PackedRow, cp_group: dist.ProcessGroup | None = None) -> RowParams:
        """What attention needs to know of the row; cp_group: of the ranks that split it, if not the module's."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=row.bounds,
            cu_seqlens_kv=row.bounds,
            max_seqlen_q=row.max_length,
            max_seqlen_kv=row.max_length,
            cp_group=cp_group,  # type: ignore[arg-type]
            shared=row.shared,
        )


def follow_positions(model: torch.nn.Module) -> None:
    """Have a chunk's rotary embeddings give each token of a row with shared prefixes its angles by its position.

    Megatron uses angles as they are where there is one for each token of the row, and numbers each segment's tokens
    from 0 elsewhere. It asks an embedding for the length of a row before it asks for the angles.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            _follow(module)


def _follow(embedding: RotaryEmbedding) -> None:
    length_of = embedding.get_rotary_seq_len
    position_L: Tensor | None = None

    def length_of_row(*args: Any, **kwargs: Any) -> int:
        nonlocal position_L
        (packing,) = [arg for arg in args if isinstance(arg, RowParams)] or [RowParams()]
        position_L = packing.shared.position_L if packing.shared else None
        return length_of(*args, **kwargs)

    def by_position(_: object, __: object, output: Any) -> Any:
        if position_L is None:
            return output
        if isinstance(output, tuple):  # with YaRN's scale
            angles, scale = output
            return angles.index_select(0, position_L), scale
        return output.index_select(0, position_L)

    embedding.get_rotary_seq_len = length_of_row  # type: ignore[method-assign]
    embedding.register_forward_hook(by_position)
