"""Checkpoints of the first format: written by Megatron's `fully_reshardable`, which gathers the optimizer's state.

They are what a checkpoint of boxes is compared with, and what has to be read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors


def save_gathered(trainer: Any, folder: Path) -> None:
    """As megarl did before 26 November 2026, but at once."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    from megarl.parallel import dist_checkpoint, groups
    from megarl.parallel.optimizer import stepping

    model = trainer._model
    dist_checkpoint._write_in_threads()
    dist_checkpoint.start_states(model.optimizer)
    state = dist_checkpoint._weights(model.chunks)
    states = {
        index: chained.sharded_param_state_fully_reshardable(state, False, metadata={})
        for index, chained in enumerate(stepping(model.optimizer))
    }
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy(), groups.dp_cp_group()
    )
    whole = state | {"optimizer": states, "step": dist_checkpoint._step(model.optimizer)}
    dist_checkpointing.save(whole, str(folder), strategy)


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of either format, by their names; without ranks."""
    reader = filesystem.FileSystemReader(folder)
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    load_tensors(tensors, storage_reader=reader, no_dist=True)
    return tensors


def check_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that two checkpoints have the same names, types, shapes and bits.

    Rows of a vocabulary may end with zeros, as many as their layouts need.
    """
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        other = expected[name]
        assert tensor.dtype == other.dtype and tensor.shape[1:] == other.shape[1:], name
        num_rows = min(len(tensor), len(other))
        assert num_rows == len(other) or "embedding" in name or "output_layer" in name, name
        assert torch.equal(tensor[:num_rows].view(torch.uint8), other[:num_rows].view(torch.uint8))
        assert not tensor[num_rows:].any() and not other[num_rows:].any(), name
